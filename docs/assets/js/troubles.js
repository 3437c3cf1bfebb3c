/* Finds the entries of the page "Troubleshoot" that match a text: for the box on that page, and for the search.

   1. The text is normalized: no colours, no prefixes of launchers, the lines of each rank together.
   2. White space, quotes and capitals are removed from the text and from the known messages. So it does not matter
      where a terminal has wrapped a line, even inside a word.
   3. Each entry is searched by its address, by all of its fixed words in order, by single lines, and by a part of them.
   4. Errors that end a program come before warnings, then errors that mostly follow from another rank's error, and the
      launcher's report is last. Longer matches come before shorter ones.
   5. If a few words match no message, they are compared with the questions of the entries, word by word.

   docs_build/pages/paste.py generates the known messages. Nothing is stored and nothing is sent. */
(() => {
  const FAR = 6000;        // Characters that a value can have between two fixed parts: a list of names, a report.
  const RUN = 4;           // Number of consecutive words that count as a part of a message.
  const AT_MOST = 5;       // Number of entries that are shown.
  const BEGUN = 25;        // Number of characters of a truncated message that are enough to recognize it.
  const SHORT = 1000;      // Number of characters of a text that may be one truncated message.
  const UNKNOWN = 5;       // Number of entries that are assumed to have a word that no question has.
  const HALF = 0.5;        // Part of the words that the questions of an entry must have.
  const WORDY = 14;        // Number of words of a question.
  const CLOSE = 0.7;       // Part of the words and of a question that must agree for the search of all pages.
  const IMPORTANCE = { error: 3, warning: 2, follows: 1, launcher: 0 };

  const squeeze = (text) => text.toLowerCase().replace(/[\s'"`\u2018\u2019\u201c\u201d\\│]/g, "");
  const wordsOf = (text) => text.toLowerCase().match(/[a-z0-9_]+/g) || [];
  const runsOf = (words) => words.slice(RUN - 1).map((_, i) => words.slice(i, i + RUN).join(" "));

  const known = window.minifsdpKnown.map((entry) => {
    const prepare = (pieces) => ({ words: pieces, squeezed: pieces.map(squeeze).filter(Boolean) });
    const wholes = entry.wholes.map(prepare);
    const lines = entry.lines.map(prepare);
    const runs = new Set(wholes.concat(lines).flatMap((one) => one.words.flatMap((piece) => runsOf(wordsOf(piece)))));
    return { ...entry, wholes, lines, runs };
  });
  // The number of entries with a sequence of words: a sequence in several entries identifies none.
  const spread = new Map();
  known.forEach((entry) => entry.runs.forEach((run) => spread.set(run, (spread.get(run) || 0) + 1)));

  /* 1. torchrun, srun and pytest have their own prefix of a line; dates can be before it. */
  const COLOURS = /\x1b\[[0-9;]*[A-Za-z]/g;
  const BEFORE = /^\s*(?:(?:\[?\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\]?|>|E {2,}|\([\w.]+ pid=\d+[^)]*\))\s*)+/;
  const RANK = /^\s*(?:\[?(?:rank|default|trainer)_?(\d+)\]?:|(\d+):(?=\s))\s?/i;

  function inOrder(text) {
    const ranks = new Map();
    for (const raw of text.replace(COLOURS, "").replace(/\\n/g, "\n").split(/\r?\n|\r/)) {
      let line = raw.replace(BEFORE, "");
      const prefix = line.match(RANK);
      if (prefix) line = line.slice(prefix[0].length).replace(BEFORE, "");
      const rank = prefix ? prefix[1] || prefix[2] : "";
      if (!ranks.has(rank)) ranks.set(rank, []);
      ranks.get(rank).push(line);
    }
    return [...ranks].map(([rank, lines]) => {
      const joined = lines.join("\n");
      return { rank, squeezed: squeeze(joined), plain: joined.toLowerCase() };
    });
  }

  /* 3. The positions of all parts in order, none too far from the next; null if there are none. The search begins at
     the longest part, because short parts occur everywhere in a large log. */
  function placesOf(pieces, text) {
    const middle = pieces.reduce((best, piece, i) => (piece.length > pieces[best].length ? i : best), 0);
    for (let at = text.indexOf(pieces[middle]); at >= 0; at = text.indexOf(pieces[middle], at + 1)) {
      const places = [[at, at + pieces[middle].length]];
      const before = pieces.slice(0, middle).reverse().every((piece) => {
        const end = places[0][0];
        const start = Math.max(0, end - FAR - piece.length);
        const found = text.slice(start, end).lastIndexOf(piece);
        places.unshift([start + found, start + found + piece.length]);
        return found >= 0;
      });
      const behind = before && pieces.slice(middle + 1).every((piece) => {
        const start = places[places.length - 1][1];
        const found = text.slice(start, start + FAR + piece.length).indexOf(piece);
        places.push([start + found, start + found + piece.length]);
        return found >= 0;
      });
      if (behind) return places;
    }
    return null;
  }

  const longest = (pieces) => pieces.reduce((a, b) => (b.length > a.length ? b : a), "").trim().replace(/\s+/g, " ");
  const shorten = (text) => (text.length > 90 ? text.slice(0, 88).replace(/\s+\S*$/, "") + " …" : text);

  /* The end of an address: the longest known one, because the next line of a log can follow without a gap. */
  const addresses = known.map((entry) => entry.id.toLowerCase()).sort((a, b) => b.length - a.length);
  function printed(part) {
    const found = new Set();
    for (const match of part.squeezed.matchAll(/#e-/g)) {
      const id = addresses.find((one) => part.squeezed.startsWith(one, match.index + 1));
      if (id) found.add(id);
    }
    for (const match of part.plain.matchAll(/(?:^|[^\w-])(e-[a-z0-9-]+)/g)) found.add(match[1]);
    return found;
  }

  function byWords(entry, part, templates, bonus) {
    let best = null;
    for (const { words, squeezed } of templates) {
      const places = squeezed.length ? placesOf(squeezed, part.squeezed) : null;
      const weight = squeezed.join("").length + bonus;
      if (places && (!best || weight > best.weight)) best = { entry, weight, places, part, quote: shorten(longest(words)) };
    }
    return best;
  }

  /* A truncated message: its first parts in order, and at the end of the text the beginning of the next part, or only a
     value. The longest match counts. */
  function begun(entry, part) {
    const text = part.squeezed;
    let best = null;
    for (const { words, squeezed } of text.length <= SHORT ? entry.wholes : []) {
      squeezed.forEach((piece, k) => {
        let length = Math.min(piece.length - 1, text.length);
        while (!text.endsWith(piece.slice(0, length))) length -= 1;
        const start = text.length - length;
        const before = k ? placesOf(squeezed.slice(0, k), text.slice(0, start)) : [];
        if (!before || (!length && (!k || start - before[k - 1][1] > 100))) return;
        const places = length ? [...before, [start, text.length]] : before;
        const weight = places.reduce((sum, [a, b]) => sum + b - a, 0);
        if (weight >= BEGUN && (!best || weight > best.weight)) best = { entry, weight, places, part, quote: shorten(longest(words)) };
      });
    }
    return best;
  }

  function certain(parts) {
    const found = [];
    for (const part of parts) {
      const addressed = printed(part);
      for (const entry of known) {
        const words = byWords(entry, part, entry.wholes, 0);
        if (addressed.has(entry.id.toLowerCase())) {
          found.push({ ...(words || { entry, places: [], part }), weight: 100000, why: `It prints the address of this entry, ${entry.id}.` });
        } else if (words) found.push({ ...words, why: `The text contains all fixed words of this message, such as “${words.quote}”.` });
        else {
          const cut = begun(entry, part);
          if (cut) found.push({ ...cut, why: "The text contains the beginning of this message, without its end." });
        }
      }
    }
    // Words that are inside a part of another message belong to that message.
    const isInside = (inner, outer) => inner !== outer && inner.part === outer.part && inner.places.length > 0 &&
      inner.weight < outer.weight && inner.places.every(([a, b]) => outer.places.some(([c, d]) => c <= a && b <= d));
    return found.filter((one) => !found.some((other) => isInside(one, other)));
  }

  function partial(parts) {
    const found = [];
    for (const part of parts) {
      const said = new Set(runsOf(wordsOf(part.plain)));
      for (const entry of known) {
        const line = byWords(entry, part, entry.lines, 1000);
        if (line) found.push({ ...line, why: `A line of this message is there: “${line.quote}”.` });
        const runs = [...entry.runs].filter((run) => said.has(run));
        const weight = runs.reduce((sum, run) => sum + 1 / spread.get(run), 0);
        // Two sequences of five consecutive words.
        if (runs.length > 1 && weight >= 1) {
          found.push({ entry, weight, part, why: `A part of this message is there: ${runs.length} of its ${entry.runs.size} rows of four words, such as “${runs[0]}”.` });
        }
        // A few typed words: they are inside a message, and not around it.
        const isShort = part.squeezed.length >= 12 && part.squeezed.length <= 200;
        if (isShort && entry.wholes.some((one) => one.squeezed.join("\n").includes(part.squeezed) || squeeze(entry.title).includes(part.squeezed))) {
          found.push({ entry, weight: 100 + 100 / entry.title.length, part, why: "Your words are a part of this message." });
        }
      }
    }
    return found;
  }

  /* 4. One result for each entry, with all ranks on which it was found. */
  function ranked(found) {
    const entries = new Map();
    for (const one of found) {
      const before = entries.get(one.entry.id);
      const ranks = new Set([...(before ? before.ranks : []), one.part.rank]);
      entries.set(one.entry.id, { ...(before && before.weight >= one.weight ? before : one), ranks });
    }
    const order = (one) => IMPORTANCE[one.entry.kind];
    return [...entries.values()].sort((a, b) => order(b) - order(a) || b.weight - a.weight).slice(0, AT_MOST);
  }

  /* 5. Words that say nothing about a problem, and the stem of a word: "saving" and "saved" are "sav", as "save" is. */
  const EMPTY = new Set((
    "a all am an and any are as at be been being both but by can cannot could did do does doesn don each every for from get " +
    "gets give gives got had has have how i if in into is isn it its just me more my no not of off on one only or our so " +
    "some than that the their them then there these they this to too use used uses using very was we were what when where " +
    "which while why will with without won you your after before during again problem error fail fails failed work works say says"
  ).split(" "));
  const stemOf = (word) => word.replace(/ies$/, "y").replace(/(?<=differ)(?:ent|ence)$/, "").replace(/(?<=..)(?:ing|ed|es|(?<!s)s)$/, "").replace(/(?<=..)e$/, "").replace(/(.)\1$/, "$1");
  const stemsOf = (text) => new Set(wordsOf(text).filter((word) => !EMPTY.has(word) && !/^\d+$/.test(word)).map(stemOf));

  const asking = known.filter((entry) => entry.asked.length).map((entry) => {
    const questions = entry.asked.map((question) => ({ question, stems: stemsOf(question) }));
    return { entry, questions, stems: new Set(questions.flatMap(({ stems }) => [...stems])) };
  });
  const rarity = new Map();
  asking.forEach(({ stems }) => stems.forEach((stem) => rarity.set(stem, (rarity.get(stem) || 0) + 1)));
  // A word that is in no question counts as much as one that is in several.
  const weightOf = (stems) => stems.reduce((sum, stem) => sum + Math.log(1 + asking.length / (rarity.get(stem) || UNKNOWN)), 0);

  /* An entry counts if its questions have half of the words. The closest question decides about the order. */
  function answering(text) {
    const said = [...stemsOf(text)];
    if (!said.length || wordsOf(text).length > WORDY || /[:\n]/.test(text.trim())) return [];
    const found = [];
    for (const { entry, questions, stems } of asking) {
      const part = weightOf(said.filter((stem) => stems.has(stem))) / weightOf(said);
      if (part < HALF) continue;
      const common = (one) => weightOf(said.filter((stem) => one.stems.has(stem)));
      const likeness = (one) => common(one) / Math.sqrt(weightOf(said) * weightOf([...one.stems]));
      const best = questions.reduce((a, b) => (likeness(b) > likeness(a) ? b : a));
      const isClose = part > CLOSE && common(best) / weightOf([...best.stems]) > CLOSE;
      const why = `Other users ask: “${best.question}”.`;
      found.push({ entry, weight: part + likeness(best), isClose, ranks: new Set(), why });
    }
    return found.sort((a, b) => b.weight - a.weight).slice(0, AT_MOST);
  }

  function find(text) {
    const parts = inOrder(text).filter((part) => part.squeezed);
    const sure = certain(parts);
    const found = ranked(sure.length ? sure : partial(parts));
    if (found.length) return { isSure: sure.length > 0, isAsked: false, found };
    return { isSure: false, isAsked: true, found: answering(text) };
  }

  window.findTroubles = find;
})();
