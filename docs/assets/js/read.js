/* Line numbers on the pages that show code. Each is a link to its line, which works without this script, too. */
(function () {
  "use strict";
  const numbers = [...document.querySelectorAll(".sbs-code a[data-n]")];
  if (!numbers.length) return;

  const said = document.createElement("p");
  said.className = "read-said";
  said.setAttribute("role", "status");
  document.body.append(said);

  function say(words) {
    said.textContent = words;
    clearTimeout(say.timer);
    say.timer = setTimeout(() => { said.textContent = ""; }, 3000);
  }

  async function copy(number) {
    const line = `line ${number.dataset.n}`;
    try {
      await navigator.clipboard.writeText(number.href);
      say(`Link to ${line} copied`);
    } catch {
      // Not every browser allows a page to write to the clipboard. The click has put the link into the address bar.
      say(`The address bar has the link to ${line}`);
    }
  }

  // A Tab stop for each number would be too many: Tab reaches one number, and the arrow keys reach the others.
  function stop(number) {
    numbers.forEach((one) => { one.tabIndex = one === number ? 0 : -1; });
  }

  function step(number, by) {
    const seen = numbers.filter((one) => one.checkVisibility ? one.checkVisibility() : one.offsetParent);
    const next = seen[seen.indexOf(number) + by];
    if (next) {
      stop(next);
      next.focus();
    }
  }

  numbers.forEach((number) => {
    number.setAttribute("aria-label", `Line ${number.dataset.n}, copy the link to it`);
    number.addEventListener("click", () => copy(number));
    number.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (by) {
        event.preventDefault();
        step(number, by);
      }
    });
  });
  stop(numbers[0]);

  // A line that only records is folded, and a line of prose has no number: the code before it represents it.
  function toLine() {
    const asked = /^#L(\d+)$/.exec(location.hash);
    if (!asked) return;
    const number = numbers.filter((one) => Number(one.dataset.n) <= Number(asked[1])).pop() || numbers[0];
    const fold = number.closest("details");
    const isHidden = fold && !fold.open;
    if (isHidden) fold.open = true;
    if (isHidden || number.id !== `L${asked[1]}`) number.scrollIntoView();
    stop(number);
  }
  window.addEventListener("hashchange", toLine);
  window.addEventListener("load", toLine);
})();
