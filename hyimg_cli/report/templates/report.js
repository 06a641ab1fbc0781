"use strict";
// The page of a run. `hyimgReport` takes what the data scripts hand over; all else is drawn from
// that, cards only as far as somebody has scrolled.
const hyimgReport = (() => {
  const AT_ONCE = 40, TILES = 12, MOST_NAMES = 10;
  // How long to wait after an answer while the run works, after it has ended, and for an answer.
  const RUNNING_MS = 2000, ENDED_MS = 10000, PATIENCE_MS = 20000;
  const INDEX = "report/index.js", PICKS = "report/picks.js";
  const by = (id) => document.getElementById(id);
  const [cards, more, query, source, viewer, show, about] =
    ["cards", "more", "query", "source", "viewer", "show", "about"].map(by);
  let run = null, uris = null, files = [], jobs = [], order = [], groups = [];
  let limit = AT_ONCE, filter = "all", opened = null, sideBySide = false, masked = false, before = 0, layer = 0, at = 50, gathering = null;
  const built = new Map(), unfolded = new Set();
  // Of each candidate its line, values and place; what somebody chose here, by line.
  const NO_RANKS = { scorers: {}, jobs: {}, poor: [], run: null };
  let ranks = NO_RANKS, known = "";
  const choices = new Map();
  // Scripts that were asked for and have not come yet; those whose last answer was none, or broken.
  const awaited = new Set(), unread = new Set();
  let answered = null;

  // --- small things

  // An element: properties as they are, `class` and attributes with a dash or in lower case too.
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in node) node[name] = value;
      else if (value !== null) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  }
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const url = (link) => (uris ? uris[link] ?? "" : link);
  const all = (job, name) => job[name] ?? [];
  const failed = (job) => job.status === "failed";
  const warned = (job) => all(job, "warnings").length > 0;
  // The source was to be kept, and is not.
  const unkept = (job) => job.kind === "global" && !failed(job);
  const gone = (job) => [...all(job, "sources"), ...all(job, "outputs")].some((one) => one.gone);
  const kinds = { all: () => true, failed, unkept, warned };

  function missing(picture) {
    return make("span", { className: "missing" }, `${picture.name}: ${picture.gone ?? "cannot be shown"}`);
  }

  // An image, or a word on why there is none. `link`: the picture itself, not its thumbnail.
  function image(picture, link, alt, lazy) {
    if (!link || !url(link)) return missing(picture);
    const img = make("img", { alt, decoding: "async", loading: lazy ? "lazy" : "eager" });
    img.addEventListener("error", () => {
      const small = picture.thumb && url(picture.thumb);
      if (small && img.getAttribute("src") !== small) img.src = small;
      else img.replaceWith(missing(picture));
    });
    img.addEventListener("load", () => img.classList.toggle("dots", 1.5 * img.naturalWidth < img.clientWidth));
    img.src = url(link);
    return img;
  }
  const thumbnail = (picture, alt) =>
    picture.is_video && !picture.thumb
      ? make("span", { className: "missing" }, "video")
      : image(picture, picture.thumb ?? picture.link, alt, true);

  // --- data

  function index(value) {
    const isBack = arrived(INDEX);
    run = value;
    answered = new Date();
    document.title = run.running ? `${run.done + run.failed}/${run.done + run.failed + run.left} ${run.title}` : run.title;
    // The first file alone, so that its cards wait for no other.
    run.files.forEach((state, n) => {
      if (String(state) === String(files[n]?.state) && !unread.has(part(n))) return;
      files[n] = { state, records: files[n]?.records ?? [] };
      setTimeout(() => script(part(n), state.join("-")), n && !jobs.length ? 100 : 0);
    });
    if (run.picks && (run.picks !== known || unread.has(PICKS))) script(PICKS, (known = run.picks));
    // Pictures may have been missed with the answers: they are asked for again.
    if (isBack) {
      built.clear();
      viewer.job = null;
    }
    if (isBack || !run.files.length) gather();
    else summarize();
  }
  const part = (n) => `report/data-${String(n + 1).padStart(4, "0")}.js`;

  // Ask for a script of this page's folder. A proxy's own page, half a file and silence are no
  // answers either: only a script that hands over its data has come.
  function script(name, version) {
    if (awaited.has(name)) return;
    awaited.add(name);
    // A question behind the name asks for the file as it is now.
    const node = make("script", { src: `${name}?${unread.has(name) ? Date.now() : version}`, async: false });
    const settle = () => {
      if (!node.parentNode) return;
      clearTimeout(timer);
      node.remove();
      if (awaited.delete(name)) unread.add(name);
      if (run) summarize();
      else if (unread.has(name)) excuse();
      if (name === INDEX) setTimeout(() => script(INDEX, Date.now()), run && !run.running ? ENDED_MS : RUNNING_MS);
    };
    const timer = setTimeout(settle, PATIENCE_MS);
    node.addEventListener("load", settle);
    node.addEventListener("error", settle);
    document.head.append(node);
  }
  // True if the last answer was none.
  function arrived(name) {
    awaited.delete(name);
    return unread.delete(name);
  }
  // The first cards at once; of what comes close behind, all together.
  function data(n, records) {
    arrived(part(n));
    (files[n] ??= {}).records = records;
    if (!jobs.length) gather();
    else gathering ??= setTimeout(gather, 50);
  }

  function picks(value) {
    arrived(PICKS);
    ranks = { ...NO_RANKS, ...value };
    const sort = by("sort"), names = Object.keys(ranks.scorers);
    sort.hidden = !names.length;
    sort.replaceChildren(sort.options[0], ...names.map((name) => make("option", { value: name }, `by ${name}`)));
    for (const job of jobs) job.key = undefined;
    built.clear();
    gather();
  }
  const pickOf = (job) => ranks.jobs[job.id];
  // Candidates of a line from the best to the worst value by one scorer; those without come last.
  function sorted(group) {
    const name = by("sort").value, sign = ranks.scorers[name] ? -1 : 1;
    const worth = (job) => (pickOf(job)?.values[name] ?? Infinity * sign) * sign;
    const gap = (a, b) => (worth(a) === worth(b) ? 0 : worth(a) - worth(b));
    return name ? [...group].sort(gap) : group;
  }
  function choose(job) {
    const { line } = pickOf(job);
    if (choices.get(line) === job.id) choices.delete(line);
    else choices.set(line, job.id);
    const made = [...choices], lines = made.map(([of, id]) => JSON.stringify({ candidate_of: of, picked: [id] }) + "\n");
    by("choices").hidden = !made.length;
    by("chosen").textContent = `${count(made.length, "choice")} made here.`;
    by("save").href = `data:application/jsonl;charset=utf-8,${encodeURIComponent(lines.join(""))}`;
    const pick = `hyimg pick ${quoted(folder())}`;
    by("saved").textContent = `${pick} --choices choices.jsonl`;
    by("command").textContent = `${pick} ${made.map(([of, id]) => `--choose ${quoted(`${of}=${id}`)}`).join(" ")}`;
    about.replaceChildren(...facts(job));
    built.clear();
    render();
  }

  // The folder that hyimg pick takes, if this page is in its place on the disk. That of drafts is in it.
  function folder() {
    if (uris || location.protocol !== "file:") return "RUN";
    return decodeURIComponent(new URL(`${ranks.run ?? "."}/`, location.href).pathname).replace(/(?<=.)\/$/, "");
  }
  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);

  // The last record about a job counts; jobs stand in the order of the manifest.
  function gather() {
    gathering = null;
    const last = new Map();
    for (const file of files) for (const record of file?.records ?? []) last.set(record.id, record);
    jobs = [...last.values()].sort((a, b) => a.place - b.place);
    for (const job of jobs) {
      job.key ??= pickOf(job) ? `line ${pickOf(job).line}` : JSON.stringify(job.sources ? job.sources.map((one) => [one.name, one.link]) : [job.prompt]);
      job.words ??= [
        job.id, job.prompt, job.answer, ...all(job, "texts").map((text) => text[1]), ...all(job, "warnings"),
        ...all(job, "sources").map((one) => one.name), ...Object.values(job.error ?? {}),
      ].join("\n").toLowerCase();
    }
    summarize();
    sources();
    draw();
    if (opened === null && location.hash.startsWith("#job=")) open(decodeURIComponent(location.hash.slice(5)));
  }

  // Nothing has come yet.
  function excuse() {
    const isServed = location.protocol !== "file:";
    by("verdict").textContent = isServed ? "No answer from the server yet" : "The folder report/ is missing next to this page";
    by("state").textContent = isServed ? "This page asks again every 2 s." : "hyimg report OUT --single-file writes a page that works alone.";
  }
  function state() {
    const ended = run.done + run.failed, isBatch = Boolean(run.requests);
    const requests = isBatch ? `${run.requests[0]} of ${count(run.requests[1], "request")}` : "";
    if (!run.running && !run.left) return run.awaits_picks ? "The candidates are not picked yet." : requests && `${requests}.`;
    const shown = [`${ended} of ${ended + run.left}${isBatch ? " pictures" : ""}`, requests].filter(Boolean).join(", ");
    const now = run.running ? `Running: ${shown} at ${new Date(run.running * 1000).toLocaleString()}.` : `Stopped: ${shown}.`;
    if (unread.has(INDEX)) return `${now} No answer since ${answered.toLocaleString()}; this page asks again every ${(run.running ? RUNNING_MS : ENDED_MS) / 1000} s.`;
    if (run.running) return `${now} New jobs appear automatically${isBatch ? "." : "; if the run was killed, run the same command again to resume."}`;
    return `${now} ${isBatch ? "A batch that was not cancelled goes on when the server runs again." : "Run the same command again to resume."}`;
  }

  function summarize() {
    const { left, other } = run, { poor } = ranks, isPicking = run.awaits_picks || (run.picks && ranks === NO_RANKS);
    by("verdict").textContent = [
      `${run.done} done`, `${run.failed} failed`, ...(left ? [`${left} left`] : []), ...run.edits,
      ...(poor.length ? [`${count(poor.length, "line")} without an accepted candidate`] : []),
    ].join(", ");
    const tone = run.failed || run.gated || poor.length || other?.failed ? "bad" : left || isPicking ? "neutral" : run.warned || run.unkept ? "warn" : "good";
    by("summary").className = `tone-${tone}`;
    by("state").textContent = state();
    const tally = (words) => {
      const counts = new Map();
      for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
      return [...counts].sort((a, b) => b[1] - a[1]);
    };
    const codes = tally(jobs.filter(failed).map((job) => job.error?.code ?? "?"));
    const gates = tally(jobs.flatMap((job) => all(job, "warnings")).filter((text) => text.startsWith("gate: ")).map((text) => text.split(" ")[1]));
    const vanished = jobs.filter(gone).length, waiting = run.files.reduce((sum, state) => sum + state[1], 0);
    const lost = [...unread].filter((name) => name !== INDEX);
    const search = (what, word) => make("button", { type: "button", className: "plain", onclick: () => look(what, word) }, word);
    by("reasons").replaceChildren(
      ...run.toys.map((text) => make("li", {}, text)),
      ...codes.map(([code, n]) => make("li", {}, `${n} failed: `, search("failed", code))),
      ...(run.unkept ? [make("li", {}, "source not kept, so the model's picture is the result: ",
        make("button", { type: "button", className: "plain", onclick: () => look("unkept", "") }, count(run.unkept, "job")))] : []),
      ...gates.map(([gate, n]) => make("li", {}, `${n} beyond a gate: `, search("warned", gate))),
      ...(poor.length ? [make("li", {}, "no accepted candidate: ", ...poor.slice(0, MOST_NAMES).flatMap((line, n) => [n ? ", " : "", search("all", line)]),
        poor.length > MOST_NAMES ? ` and ${poor.length - MOST_NAMES} more` : "")] : []),
      ...(other ? [make("li", {}, other.link && !uris ? make("a", { href: other.link }, other.text) : other.text, other.failed ? `: ${other.failed} failed` : "")] : []),
      ...(lost.length ? [make("li", {}, `${lost.join(", ")} did not load; this page asks again.`)] : []),
      ...(vanished ? [make("li", {}, `${count(vanished, "job")} with a picture that is missing or cannot be read`)] : []),
      ...(waiting ? [make("li", {}, `Thumbnails of ${count(waiting, "job")} are not ready yet${run.running ? "" : ": run hyimg report OUT"}.`)] : []),
      ...(run.capped ? [make("li", {}, run.capped)] : []),
    );
    by("environment").replaceChildren(
      ...run.environment.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    for (const chip of document.querySelectorAll("[data-show]")) {
      const n = jobs.filter(kinds[chip.dataset.show]).length;
      chip.querySelector("b").textContent = n.toLocaleString("en");
      chip.disabled = n === 0 && chip.dataset.show !== "all";
      chip.hidden = n === 0 && chip.dataset.show === "unkept";
    }
  }

  function sources() {
    const names = [...new Set(jobs.flatMap((job) => all(job, "sources").map((one) => one.name)))];
    source.hidden = names.length < 2;
    if (names.length === source.options.length - 1) return;
    const chosen = source.value;
    source.replaceChildren(source.options[0], ...names.map((name) => make("option", { value: name }, name)));
    source.value = chosen;
  }

  // --- cards: one for each set of sources, or for each prompt without sources

  function look(what, words) {
    filter = what;
    query.value = words ?? query.value;
    limit = AT_ONCE;
    draw();
    scrollTo({ top: Math.min(scrollY, cards.offsetTop) });
  }

  function draw() {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const seen = jobs.filter((job) =>
      kinds[filter](job) && words.every((word) => job.words.includes(word)) &&
      (!source.value || all(job, "sources").some((one) => one.name === source.value)));
    const found = new Map();
    for (const job of seen) (found.get(job.key) ?? found.set(job.key, []).get(job.key)).push(job);
    groups = [...found.values()].map(sorted);
    order = groups.flat();
    for (const chip of document.querySelectorAll("[data-show]"))
      chip.setAttribute("aria-pressed", chip.dataset.show === filter);
    by("count").textContent = `${count(seen.length, "job")}, ${count(groups.length, "card")}`;
    by("none").hidden = seen.length > 0 || jobs.length === 0;
    render();
    if (opened !== null) turn(0);
  }

  // Elements of cards that did not change stay; the focus stays with its job.
  function render() {
    const focused = document.activeElement?.dataset?.id, wanted = groups.slice(0, limit).map(card);
    wanted.forEach((node, n) => {
      if (cards.children[n] !== node) cards.insertBefore(node, cards.children[n] ?? null);
    });
    while (cards.children.length > wanted.length) cards.lastChild.remove();
    more.hidden = limit >= groups.length;
    if (focused && document.activeElement.dataset.id !== focused) tileOf(focused)?.focus({ preventScroll: true });
  }
  const tileOf = (id) => [...cards.querySelectorAll(".job")].find((node) => node.dataset.id === id);

  function card(group) {
    const first = group[0], known = built.get(first.key);
    const folded = !unfolded.has(first.key) && group.length > TILES;
    if (known && known.folded === folded && known.group.length === group.length &&
        known.group.every((job, n) => job === group[n])) return known.node;
    const from = all(first, "sources"), alike = group.every((job) => job.prompt === first.prompt);
    const shown = folded ? group.slice(0, TILES) : group;
    const name = pickOf(first)?.line || from.map((one) => one.name).join(" + ") || (group.length > 1 ? count(group.length, "picture") : first.id);
    const strip = make("div", { className: "strip" },
      ...from.map((picture) => make("figure", { className: "tile" },
        make("span", { className: "frame" }, thumbnail(picture, `source ${picture.name}`)),
        make("figcaption", {}, "source"))),
      ...shown.map((job) => tile(job, !alike, job.id !== name)));
    const node = make("article", { className: "card" },
      make("div", { className: "head" },
        make("h2", { title: name }, name),
        from.length && group.length > 1 ? make("span", {}, count(group.length, "job")) : null),
      alike && first.prompt ? make("p", { className: "prompt" }, first.prompt) : null,
      strip,
      folded ? make("button", { type: "button", className: "plain", onclick: () => { unfolded.add(first.key); render(); } },
        `show all ${group.length}`) : null);
    const { width, height } = all(first, "outputs")[0] ?? from[0] ?? {};
    node.style.setProperty("--shape", width && height ? Math.min(2, Math.max(0.75, width / height)) : 1);
    node.style.setProperty("--units", Math.ceil((from.length + shown.length) / 2));
    built.set(first.key, { node, group, folded });
    return node;
  }

  function tile(job, withPrompt, withId) {
    const picture = all(job, "outputs")[0];
    const inside = job.answer !== undefined ? make("span", { className: "answer" }, job.answer) : failed(job) || !picture
      ? make("span", { className: "problem" }, make("b", {}, job.error?.code ?? job.status ?? ""), ` ${job.error?.message ?? ""}`)
      : thumbnail(picture, `${job.id}: ${job.prompt ?? ""}`);
    const pick = pickOf(job), mine = pick && choices.get(pick.line) === job.id;
    const marks = [picture?.is_video && "▶", failed(job) && "failed", unkept(job) ? "source not kept" : warned(job) && "warned", mine ? "chosen" : pick && pick.state !== "ranked" && pick.state].filter(Boolean);
    return make("button", {
      type: "button", className: `tile job${failed(job) ? " tone-bad" : ""}`, "data-id": job.id,
      "aria-label": [job.id, job.prompt, ...marks].filter(Boolean).join(", "), onclick: () => open(job.id),
    },
      make("span", { className: "frame" }, inside, ...marks.filter((mark) => mark !== "failed").map((mark) => make("span", { className: "mark" }, mark))),
      make("span", { className: "name" }, withId ? make("span", {}, job.id) : null, job.seed === undefined ? null : make("span", {}, `seed ${job.seed}`)),
      pick ? make("span", { className: "says" }, said(pick)) : null,
      withPrompt && job.prompt ? make("span", { className: "says" }, job.prompt) : null);
  }
  // Values, and what was against it: a reason gives the value that it is about.
  function said(pick) {
    const why = pick.state === "rejected" ? pick.why : [];
    const values = Object.entries(pick.values).filter(([name, value]) =>
      value !== null && !name.includes(".") && !why.some((reason) => reason.replace(/^final: /, "").startsWith(`${name} `)));
    return [values.map(([name, value]) => `${name} ${+value.toPrecision(4)}`).join(", "), ...why].filter(Boolean).join("; ");
  }

  // --- one job, large

  function open(id) {
    if (!order.some((job) => job.id === id)) return;
    opened = id;
    before = layer = 0;
    at = 50;
    if (!viewer.open) viewer.showModal();
    detail();
    by("viewer-title").focus();
  }
  function turn(step) {
    const here = order.findIndex((job) => job.id === opened);
    const next = order[here + step];
    if (here < 0 || !next) return;
    if (step) [opened, before, layer, at] = [next.id, 0, 0, 50];
    if (step || next !== viewer.job) detail();
    else position(here);
  }
  function position(here) {
    by("position").textContent = `${here + 1} of ${order.length}`;
    by("previous").disabled = here === 0;
    by("next").disabled = here === order.length - 1;
  }
  function detail() {
    const here = order.findIndex((job) => job.id === opened), job = order[here];
    viewer.job = job;
    history.replaceState(null, "", `#job=${encodeURIComponent(job.id)}`);
    by("viewer-title").textContent = job.id;
    position(here);
    show.replaceChildren(...stage(job));
    about.replaceChildren(...facts(job));
    const after = all(order[here + 1] ?? {}, "outputs")[0];
    if (after?.link && !after.is_video) new Image().src = url(after.link);
  }

  function stage(job) {
    const outputs = all(job, "outputs"), result = outputs[layer], from = all(job, "sources");
    if (!result || failed(job)) return from.map((one) => figure(one, one.name));
    if (result.is_video) return [film(result)];
    if (!from.length) return [figure(result, "", job)];
    const picture = from[Math.min(before, from.length - 1)];
    const choices = from.length < 2 ? [] : from.map((one, n) => make("button", {
      type: "button", "aria-pressed": String(n === before), onclick: () => { before = n; redraw(); },
    }, `before: ${one.name}`));
    const mode = make("button", { type: "button", id: "mode", "aria-pressed": String(sideBySide), onclick: toggle }, "side by side");
    const mask = job.mask?.link && url(job.mask.link) ? [make("button", { type: "button", id: "masking", "aria-pressed": String(masked), onclick: unmask }, "mask")] : [];
    const layers = outputs.length < 2 ? [] : outputs.map((one, n) => make("button", {
      type: "button", "aria-pressed": String(n === layer), onclick: () => { layer = n; redraw(); },
    }, one.layer ? `layer ${one.layer}` : "all layers"));
    const controls = make("div", { className: "chips" }, mode, ...mask, ...choices, ...layers);
    if (sideBySide || picture.gone || result.gone)
      return [controls, make("div", { className: "pair" }, overlaid(figure(picture, `before: ${picture.name}`, job), frames(job)), overlaid(figure(result, "after", job), [...matte(job), ...frames(job)])), ...proof(job)];
    return [controls, slider(picture, result, job), ...proof(job)];
  }
  const redraw = () => show.replaceChildren(...stage(viewer.job));
  const toggle = () => { sideBySide = !sideBySide; redraw(); by("mode")?.focus(); };
  const unmask = () => { masked = !masked; redraw(); by("masking")?.focus(); };

  function figure(picture, caption, job) {
    const node = make("figure", { className: "large" }, image(picture, picture.link ?? picture.thumb, caption || job?.prompt || "", false),
      caption ? make("figcaption", {}, caption) : null);
    const img = node.querySelector("img");
    if (!job) img?.addEventListener("load", () => shape(node, img.naturalWidth, img.naturalHeight));
    return shaped(node, job);
  }
  function overlaid(node, layers) {
    const shown = node.querySelector("img");
    if (!shown || !layers.length) return node;
    const both = make("span", { className: "masked" });
    shown.replaceWith(both);
    both.append(shown, ...layers);
    return node;
  }
  // Darkens what was copied from the source, then lifts it to grey: so it shows on any picture.
  function matte(job) {
    if (!masked || !job.mask?.link) return [];
    return ["mask: transparent where the picture was edited", ""].map((alt) => Object.assign(image(job.mask, job.mask.link, alt, false), { className: "mask" }));
  }
  // On a photograph of which a part was drawn: that part, and where the edit was allowed.
  function frames(job) {
    const { width, height } = all(job, "outputs")[0];
    return (job.crop?.frames ?? []).map(([name, [left, top, right, bottom]]) => {
      const node = make("i", { className: `box ${name}` }, make("b", {}, name));
      const places = { left: left / width, top: top / height, width: (right - left) / width, height: (bottom - top) / height };
      for (const [side, part] of Object.entries(places)) node.style[side] = `${100 * part}%`;
      return node;
    });
  }
  // What was measured; and of a photograph of which a part was drawn, that part.
  function proof(job) {
    const words = job.proof ? [make("p", { className: "proof" }, job.proof)] : [];
    return job.crop && !uris ? [...words, ...job.crop.parts.map((part) => drawnPart(job, part))] : words;
  }
  // A crop before, as it was drawn, and after, each pixel of the source a pixel. They scroll together.
  function drawnPart(job, { crop: [left, top, right, bottom], middle, redraw }) {
    const size = [right - left, bottom - top], result = all(job, "outputs")[0], whole = [result.width, result.height];
    const panes = [
      ["before", all(job, "sources")[job.crop.source], whole, [left, top]],
      ["redraw", redraw, size, [0, 0]],
      ["after", result, whole, [left, top]],
    ].filter(([, picture]) => picture).map(([name, picture, of, from]) => {
      const shown = image(picture, picture.link, `${name}, at 100 %`, false);
      Object.assign(shown.style, { width: `${of[0]}px`, height: `${of[1]}px`, left: `${-from[0]}px`, top: `${-from[1]}px` });
      const part = make("div", { className: "part" }, shown);
      Object.assign(part.style, { width: `${size[0]}px`, height: `${size[1]}px` });
      return make("figure", {}, make("div", { className: "pane", tabIndex: 0, role: "group", "aria-label": `${name}, at 100 %: scroll with the arrow keys` }, part),
        make("figcaption", {}, `${name}, at 100 %`));
    });
    const each = panes.map((one) => one.firstChild);
    for (const one of each)
      one.addEventListener("scroll", () => each.forEach((other) => { other.scrollTop = one.scrollTop; other.scrollLeft = one.scrollLeft; }));
    // The middle of the region comes first.
    if (middle) requestAnimationFrame(() => each.forEach((one) => one.scrollTo((middle[0] + middle[2]) / 2 - left - one.clientWidth / 2, (middle[1] + middle[3]) / 2 - top - one.clientHeight / 2)));
    return make("div", { className: "parts" }, ...panes);
  }
  // As large as the window lets it be, in the shape of the result.
  function shaped(node, job) {
    const { width = 1, height = 1 } = (job && all(job, "outputs")[0]) ?? {};
    return shape(node, width, height);
  }
  function shape(node, width, height) {
    node.style.setProperty("--w", width);
    node.style.setProperty("--h", height);
    return node;
  }
  function film(result) {
    if (result.gone) return missing(result);
    const video = make("video", { src: url(result.link), controls: true, loop: true, muted: true, autoplay: true, playsInline: true });
    if (result.thumb) video.poster = url(result.thumb);
    return shaped(make("figure", { className: "large" }, video), viewer.job);
  }
  // A source is cut around its centre to the result's shape, as the model saw it.
  function slider(picture, result, job) {
    const input = make("input", { type: "range", id: "slider", min: 0, max: 100, step: 1, value: at, "aria-label": "Percent of the picture that shows the state before" });
    const node = make("div", { className: "stage" },
      Object.assign(image(result, result.link, `after: ${job.prompt ?? ""}`, false), { id: "under" }),
      Object.assign(image(picture, picture.link, `before: ${picture.name}`, false), { id: "over" }),
      ...matte(job), ...frames(job),
      input, make("i", { className: "handle" }));
    node.querySelector("#over").classList.add("over");
    input.addEventListener("input", () => { at = Number(input.value); slide(); });
    // With the mouse it needs no focus: the arrow keys stay those for the next job.
    input.addEventListener("pointerup", () => input.blur());
    const box = make("figure", { className: "large" }, node, make("figcaption", {}, make("span", {}, `before: ${picture.name}`), make("span", {}, "after")));
    node.style.setProperty("--at", `${at}%`);
    return shaped(box, job);
  }
  function slide() {
    const input = by("slider");
    if (!input) return;
    input.value = at;
    input.parentElement.style.setProperty("--at", `${at}%`);
  }

  function facts(job) {
    const list = (pairs) => make("dl", { className: "facts" }, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    const file = (one, what) => make("p", {}, make("a", { href: one.link, target: "_blank", rel: "noopener" }, `open ${one.name}`), what);
    const fold = (name, ...inside) => make("details", {}, make("summary", {}, name), ...inside);
    const result = all(job, "outputs")[0], think = all(job, "texts").filter((text) => text[0] === "think");
    const size = result?.width ? [["size", `${result.width} × ${result.height}`]] : [];
    const seed = job.seed === undefined ? [] : [["seed", String(job.seed)]];
    const pick = pickOf(job);
    return [
      ...(pick ? [
        make("p", { className: pick.state === "rejected" ? "warning" : "" }, pick.why.join("; ")),
        list(Object.entries(pick.values).map(([name, value]) => [name, value === null ? "no value" : String(+value.toPrecision(6))])),
        make("p", {}, make("button", { type: "button", "aria-pressed": String(choices.get(pick.line) === job.id), onclick: () => choose(job) },
          choices.get(pick.line) === job.id ? "chosen: take it back" : `choose this one for ${pick.line}`)),
      ] : []),
      job.error ? make("div", { className: "problem tone-bad" }, make("p", {}, make("b", {}, job.error.code), ` ${job.error.message}`),
        job.error.hint ? make("p", {}, `What to do: ${job.error.hint}`) : null) : null,
      ...all(job, "warnings").map((text) => make("p", { className: "warning" }, text)),
      job.prompt ? make("p", { className: "prompt" }, job.prompt) : null,
      job.answer === undefined ? null : make("p", { className: "labelled" }, make("small", {}, "answer"), job.answer),
      ...all(job, "texts").filter((text) => text[0] !== "think").map(([name, text]) => make("p", { className: "labelled" }, make("small", {}, name), text)),
      ...think.map(([, text]) => fold("think", make("p", { className: "written" }, text))),
      list([...seed, ...size, ...all(job, "facts")]),
      job.phases ? fold("phases", list(job.phases)) : null,
      job.settings ? fold("settings", list(job.settings)) : null,
      ...(uris ? [] : all(job, "outputs").filter((one) => one.link).map((one) => file(one, one.layer ? `: layer ${one.layer}, from the lowest` : ""))),
      ...all(job, "redraws").map((drawn) => file(drawn, ": what the model drew")),
    ].filter(Boolean);
  }

  function closed() {
    const tile = tileOf(opened);
    opened = viewer.job = null;
    show.replaceChildren();
    history.replaceState(null, "", location.pathname + location.search);
    tile?.focus();
    tile?.scrollIntoView({ block: "nearest" });
  }

  // --- hands and keys

  // Moves the focus to the tile before or behind; cards further down are made on the way.
  function step(by) {
    const tiles = () => [...cards.querySelectorAll(".job")];
    const here = tiles().indexOf(document.activeElement) + by;
    if (here >= tiles().length && limit < groups.length) grow();
    const tile = tiles()[Math.max(0, here)];
    tile?.focus();
    tile?.scrollIntoView({ block: "nearest" });
  }
  function grow() {
    limit += AT_ONCE;
    render();
  }
  const typing = (node) => node.matches?.("input:not([type=range]), select, textarea");
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape" && event.target === query) look(filter, (query.value = ""));
      return;
    }
    const onSlider = event.target.id === "slider", onPane = event.target.matches?.(".pane");
    const deeds = viewer.open
      ? {
        ...(onSlider || onPane || event.target.tagName === "VIDEO" ? {} : {
          ArrowLeft: () => turn(-1), ArrowRight: () => turn(1),
          ArrowUp: () => by("slider") && (at = Math.min(100, at + 5), slide(), true),
          ArrowDown: () => by("slider") && (at = Math.max(0, at - 5), slide(), true),
        }),
        k: () => turn(-1), j: () => turn(1), s: () => by("mode") && toggle(), m: () => by("masking") && unmask(),
      }
      : { ArrowLeft: () => step(-1), ArrowRight: () => step(1), k: () => step(-1), j: () => step(1), "/": () => query.focus() };
    if (deeds[event.key] && deeds[event.key]() !== null) event.preventDefault();
  }

  document.addEventListener("keydown", key);
  query.addEventListener("input", () => { clearTimeout(query.timer); query.timer = setTimeout(() => look(filter), 80); });
  source.addEventListener("change", () => look(filter));
  by("sort").addEventListener("change", () => look(filter));
  document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  for (const chip of document.querySelectorAll("[data-show]")) chip.addEventListener("click", () => look(chip.dataset.show));
  by("clear").addEventListener("click", () => { source.value = ""; look("all", ""); });
  by("previous").addEventListener("click", () => turn(-1));
  by("next").addEventListener("click", () => turn(1));
  by("close").addEventListener("click", () => viewer.close());
  viewer.addEventListener("close", closed);
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });
  // Observed anew each time: where it is still in sight nothing else would tell.
  const below = new IntersectionObserver((seen) => {
    if (!seen.some((one) => one.isIntersecting)) return;
    grow();
    below.unobserve(more);
    below.observe(more);
  }, { rootMargin: "1500px" });
  below.observe(more);

  return {
    index, data, script, picks,
    pictures: (value) => { uris = value; },
    inside: (records) => data(0, records),
  };
})();
