/* The filter of the spec page. The choice is kept in the address, so that it can be sent to somebody. */
(function () {
  "use strict";
  const section = document.getElementById("spec-section");
  if (!section) return;
  const verdict = document.getElementById("spec-verdict");
  const words = document.getElementById("spec-words");
  const count = document.getElementById("spec-count");
  const rows = [...document.querySelectorAll(".spec-row")];
  const texts = rows.map((row) => row.textContent.toLowerCase());

  function apply() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, n) => {
      const fits =
        (!section.value || row.dataset.section === section.value) &&
        (!verdict.value || row.dataset.verdict === verdict.value) &&
        wanted.every((word) => texts[n].includes(word));
      row.hidden = !fits;
      shown += fits;
    });
    count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    // A headline above nothing would be noise.
    document.querySelectorAll("article h2").forEach((head) => {
      let one = head.nextElementSibling, inside = [];
      while (one && one.tagName !== "H2") { inside.push(one, ...one.querySelectorAll(".spec-row")); one = one.nextElementSibling; }
      const own = inside.filter((e) => e.classList.contains("spec-row"));
      const hide = own.length > 0 && own.every((e) => e.hidden);
      [head, ...inside.filter((e) => !e.classList.contains("spec-row"))].forEach((e) => { e.style.display = hide ? "none" : ""; });
    });
  }
  const asked = new URLSearchParams(location.search);
  section.value = asked.get("section") || "";
  verdict.value = asked.get("show") || "";
  [section, verdict, words].forEach((one) => one.addEventListener("input", apply));
  apply();
})();
