/* What the theme's search does not do by itself:

   1. The texts that are searched are loaded when somebody begins to search, and not with each page. The theme hands the
      index to its worker in a message with `docs`. In the site's index these are empty; the message is held back until
      the search is opened, and gets its texts then. Queries wait meanwhile: the theme sends none before the worker has
      said that it is ready.
   2. An error message finds its entry of "Troubleshoot" first. Its words alone are those of many pages, so a query is
      also given to what finds pasted tracebacks (troubles.js). */
(function () {
  "use strict";
  const [INDEX, QUERY, ANSWER] = [0, 2, 3];  // Kinds of the theme's messages.
  const MANY = 6;  // Words from which on a query may be a part of a message rather than words looked for.
  const MOST = 12;  // Words of such a query that the theme is asked for: it takes a while for each.
  const here = document.currentScript.src;
  const scripts = ["../../search/documents.js", "../troubles/known.js", "troubles.js"];
  const Plain = window.Worker;

  function opened() {
    const toggle = document.querySelector("[data-md-toggle=search]");
    return new Promise((done) => {
      if (toggle.checked) done();
      else toggle.addEventListener("change", done, { once: true });
    });
  }

  function load(name) {
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = new URL(name, here);
      script.onload = done;
      script.onerror = failed;
      document.head.append(script);
    });
  }

  async function texts() {
    for (const name of scripts) await load(name);
    return window.minifsdpDocuments;
  }

  const isLong = (query) => query.split(/\s+/).length >= MANY;

  window.minifsdpTroubles = troubles;  // for tests

  /* The entries of "Troubleshoot" that a query speaks of, for certain, or with many words in a row. */
  function troubles(query) {
    const { isSure, found } = window.findTroubles(query);
    return isSure || isLong(query) ? found.map((one) => `troubleshoot.html#${one.entry.id}`) : [];
  }

  /* A message has colons and dashes, which the theme's search takes for its own signs. */
  function plain(query) {
    if (!isLong(query) && !troubles(query).length) return query;
    return query.replace(/[*+\-:~^"]/g, " ").trim().split(/\s+/).slice(0, MOST).join(" ");
  }

  function answerWith(places, data) {
    if (!places.length) return data;
    const first = places.map((place) => window.minifsdpDocuments.find((one) => one.location === place));
    const others = data.items.map((group) => group.filter((one) => !places.includes(one.location)));
    const best = Math.max(0, ...others.flat().map((one) => one.score));
    const own = first.map((one, n) => [{ ...one, title: `Troubleshoot: ${one.title}`, score: best + first.length - n, terms: {} }]);
    return { ...data, items: [...own, ...others.filter((group) => group.length)] };
  }

  window.Worker = class extends Plain {
    constructor(...address) {
      super(...address);
      this.asked = [];  // Each is answered, in their order.
      this.addEventListener("message", (event) => this.improve(event));
    }

    postMessage(message) {
      if (message.type === QUERY) {
        this.asked.push(troubles(message.data));
        super.postMessage({ ...message, data: plain(message.data) });
      } else if (message.type === INDEX && message.data.docs.length === 0) {
        opened().then(texts).then((docs) => super.postMessage({ ...message, data: { ...message.data, docs } }));
      } else super.postMessage(message);
    }

    /* Takes an answer from the theme's hands, which would listen next, and hands it on with the entries before it. */
    improve(event) {
      if (event.data.type !== ANSWER || event.isImproved) return;
      event.stopImmediatePropagation();
      const data = answerWith(this.asked.shift() || [], event.data.data);
      this.dispatchEvent(Object.assign(new MessageEvent("message", { data: { ...event.data, data } }), { isImproved: true }));
    }
  };
})();
