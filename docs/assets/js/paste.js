/* Paste your traceback: shows the entries of this page that match pasted text, while the user types. troubles.js finds
   them. Nothing is stored and nothing is sent. */
(() => {
  const form = document.getElementById("paste");
  const box = document.getElementById("paste-text");
  const status = document.getElementById("paste-status");
  const list = document.getElementById("paste-found");

  function make(tag, className, text) {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  }

  /* The text below the headline of an entry, as a copy without ids and without the lines that the box shows already. */
  function bodyOf(id) {
    const body = make("div", "paste-body", "");
    let next = document.getElementById(id).nextElementSibling;
    for (; next && !/^H[1-3]$/.test(next.tagName); next = next.nextElementSibling) {
      if (next.classList.contains("quoted")) continue;
      const copy = next.cloneNode(true);
      [copy, ...copy.querySelectorAll("[id]")].forEach((element) => element.removeAttribute("id"));
      body.append(copy);
    }
    return body;
  }

  function show({ entry, why, ranks }, isFirst) {
    const item = make("li", "paste-entry", "");
    const link = make("a", "paste-title", entry.title);
    link.href = `#${entry.id}`;
    const named = [...ranks].filter(Boolean).sort((a, b) => a - b);
    const where = named.length ? ` On rank${named.length > 1 ? "s" : ""} ${named.join(", ")}.` : "";
    const after = entry.kind === "follows" ? " It mostly follows from an error on another rank: look there first."
      : entry.kind === "launcher" ? " The launcher reports that a process has ended, and not why: look for the first error above." : "";
    item.append(make("span", "paste-api", entry.kind === "warning" ? `${entry.api}, a warning` : entry.api), link);
    item.append(make("p", "paste-why", why + where + after));
    if (isFirst) item.append(bodyOf(entry.id));
    return item;
  }

  function look() {
    const text = box.value;
    if (!text.trim()) {
      list.replaceChildren();
      status.textContent = "";
      return;
    }
    const { isSure, isAsked, found } = window.findTroubles(text);
    list.replaceChildren(...found.map((one, i) => show(one, i === 0)));
    const entries = `${found.length} ${found.length === 1 ? "entry" : "entries"}`;
    if (!found.length) status.textContent = "No entry matches this text. Try the last lines of the rank that failed first, the words of the error without names and numbers, or a few words about the problem.";
    else if (isAsked) status.textContent = `${entries} for these words: ${found[0].entry.title}`;
    else if (!isSure) status.textContent = `The text contains no complete message. ${entries} with a part of it: ${found[0].entry.title}`;
    else status.textContent = `${entries} found${found.length > 1 ? ", the likeliest cause first" : ""}: ${found[0].entry.title}`;
  }

  const EXAMPLE = `[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 61, in <module>
[rank1]:     loss = model.module.decoder(batch).mean()
[rank1]: RuntimeError: The tensor has a non-zero number of elements, but its data is not
[rank1]:  allocated yet.
[rank0]: [E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: train.py FAILED`;

  let waiting = 0;
  box.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(look, 150);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    box.value = "";
    look();
    box.focus();
  });
  document.getElementById("paste-example").addEventListener("click", () => {
    box.value = EXAMPLE;
    look();
  });
  // A browser can keep the text of the box when the user returns to the page.
  look();
})();
