/* Additions to the theme's search:

   1. The texts for the search are loaded when a user begins to search, and not with each page. The theme passes the
      index to its worker in a message with `docs`. In the site's index the texts are empty. This script delays the
      message until the search is opened, and adds the texts. Queries wait meanwhile: the theme sends none before the
      worker has reported that it is ready.
   2. An error message finds its entry of "Troubleshoot" first. Its words occur on many pages, so each query is also
      passed to the search for pasted tracebacks (troubles.js). */
(function () {
  "use strict";
  const [INDEX, QUERY, ANSWER] = [0, 2, 3];  // Kinds of the theme's messages.
  const MANY = 6;  // Number of words from which on a query may be a part of a message.
  const MOST = 12;  // Number of words of such a query that the theme searches for, because each takes time.
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

  /* The entries of "Troubleshoot" that a query matches with certainty, with many consecutive words, or as a question. */
  function troubles(query) {
    const { isSure, isAsked, found } = window.findTroubles(query);
    const shown = isAsked ? found.filter((one) => one.isClose) : isSure || isLong(query) ? found : [];
    return shown.map((one) => `troubleshoot.html#${one.entry.id}`);
  }

  /* A message has colons and dashes, which are operators in the theme's search. */
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
      this.asked = [];  // Each query is answered, in order.
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

    /* Receives an answer before the theme does, and passes it on with these entries in front. */
    improve(event) {
      if (event.data.type !== ANSWER || event.isImproved) return;
      event.stopImmediatePropagation();
      const data = answerWith(this.asked.shift() || [], event.data.data);
      this.dispatchEvent(Object.assign(new MessageEvent("message", { data: { ...event.data, data } }), { isImproved: true }));
    }
  };
})();
