/* The texts that are searched are loaded when somebody begins to search, and not with each page.

   The theme hands the index to its worker in a message with `docs`. In the site's index these are empty; the message is
   held back until the search is opened, and gets its texts then. Queries wait meanwhile: the theme sends none before the
   worker has said that it is ready. */
(function () {
  "use strict";
  const texts = new URL("../../search/documents.js", document.currentScript.src);
  const Plain = window.Worker;

  function opened() {
    const toggle = document.querySelector("[data-md-toggle=search]");
    return new Promise((done) => {
      if (toggle.checked) done();
      else toggle.addEventListener("change", done, { once: true });
    });
  }

  function loaded() {
    return new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = texts;
      script.onload = () => done(window.minifsdpDocuments);
      script.onerror = failed;
      document.head.append(script);
    });
  }

  window.Worker = class extends Plain {
    postMessage(message) {
      const isEmpty = message.data && message.data.docs && message.data.docs.length === 0;
      if (!isEmpty) super.postMessage(message);
      else opened().then(loaded).then((docs) => super.postMessage({ ...message, data: { ...message.data, docs } }));
    }
  };
})();
