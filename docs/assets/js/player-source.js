/* The functions of the package that run at a moment, with the current line of the rank. */
(function (root) {
  "use strict";
  const player = root.minifsdpPlayer;
  const { make } = player;
  let functions = null;

  /* The panel. Its source is in its own script, because a page opened from a disk can load scripts and no other
     files. */
  function panel(address) {
    const way = make("p", { class: "source-way" });
    const title = make("p", { class: "source-title" });
    const code = make("code");
    const box = make("div", { class: "source-box highlight", tabindex: 0, role: "region", "aria-label": "The source that runs" }, make("pre", {}, code));
    const element = make("section", { class: "player-source" }, way, title, box);
    let frames = [], chosen = 0, wanted = null;

    root.minifsdpSource = (found) => { functions = found; if (wanted) draw(); };
    document.head.append(make("script", { src: address }));

    /* frames: for each running function the name, file, address, whether it is a hook that the named function
       registered, and the line. */
    function show(run, m) {
      wanted = { run, m };
      frames = run.stacks[m.stack] || [];
      chosen = 0;
      draw();
    }
    function draw() {
      way.replaceChildren(...frames.flatMap((frame, i) => [i ? " \u2190 " : "", frame[3] ? "hook registered by " : "", choice(frame, i)]));
      if (!frames.length) {
        way.textContent = wanted.run.knows.source ? "The training loop runs, outside of the package." : "";
        title.textContent = wanted.run.knows.source ? "" : wanted.run.remark;
        return code.replaceChildren();
      }
      const [name, file, href, , line] = frames[chosen];
      title.replaceChildren(`${file}, line ${line}: `, make("a", { href }, "read the module"));
      const lines = (functions && functions[file] && functions[file][name]) || [];
      code.replaceChildren(...lines.map(([number, html]) => {
        const one = make("span", { class: "source-line", "data-n": number, innerHTML: html || " " });
        if (number === line) one.setAttribute("aria-current", "true");
        return one;
      }));
      const here = code.querySelector("[aria-current]");
      // Only the box scrolls, not the page.
      box.scrollTop += here ? here.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2.5 : -box.scrollTop;
    }
    function choice(frame, i) {
      const one = make("button", { type: "button", class: "source-frame", onclick: () => { chosen = i; draw(); way.querySelectorAll("button")[i].focus(); } }, frame[0]);
      one.setAttribute("aria-pressed", String(i === chosen));
      return one;
    }
    return { element, show };
  }

  player.sourcePanel = panel;
})(window);
