// Draws /ui/state every two seconds. Text from the cluster is set as text, never as markup.
"use strict";

const PERIOD = 2000;
const DEADLINE = 5000;
const PHASES = ["begin", "transfer", "verify", "activate"];
const SVG = "http://www.w3.org/2000/svg";
// Members that the picture shows; the table shows all.
const DRAWN = 24;

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  if (options.class) element.className = options.class;
  if (options.title) element.title = options.title;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const shown = (value) => (value === null || value === undefined ? "–" : String(value));

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = count;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
}

const clock = (time) => new Date(time).toLocaleTimeString();

function table(name, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", {}, text)));
  const whole = make("table", {}, make("caption", {}, name), make("thead", {}, head), make("tbody", {}, ...rows));
  const scroll = make("div", { class: "scroll" }, whole);
  // Wide tables are scrolled with the keyboard too.
  scroll.tabIndex = 0;
  return scroll;
}

function ranks(member) {
  if (member.rankOffset === null) return `– (${member.size})`;
  return member.size === 1 ? `${member.rankOffset}` : `${member.rankOffset}–${member.rankOffset + member.size - 1}`;
}

// The members from left to right: the source, the members that it sent to, those that they sent to, and so on.
function columns(members) {
  const place = new Map();
  const depth = (member, passed) => {
    if (member.source) return 0;
    if (place.has(member.name)) return place.get(member.name);
    const from = members.find((other) => other.name === member.from);
    const found = from === undefined || passed.has(member.name) ? 1 : depth(from, new Set(passed).add(member.name)) + 1;
    place.set(member.name, found);
    return found;
  };
  const found = [];
  for (const member of members) {
    const at = depth(member, new Set());
    (found[at] ??= []).push(member);
  }
  return found.filter((column) => column !== undefined);
}

// Members as boxes, and the last transfer to each as an arrow from its sender.
function topology(object) {
  const members = object.members.filter((member) => member.source || member.rankOffset !== null).slice(0, DRAWN);
  if (members.length < 2) return null;
  const [wide, high, across, down] = [160, 52, 86, 22];
  const boxes = new Map();
  const found = columns(members);
  found.forEach((column, x) =>
    column.forEach((member, y) => boxes.set(member.name, { member, x: 2 + x * (wide + across), y: 2 + y * (high + down) })));
  const width = found.length * (wide + across) - across + 4;
  const height = Math.max(...found.map((column) => column.length)) * (high + down) - down + 4;
  const parts = [];
  for (const { member, x, y } of boxes.values()) {
    const from = boxes.get(member.from);
    if (from !== undefined && from.member !== member) {
      const [x1, y1, x2, y2] = [from.x + wide, from.y + high / 2, x - 2, y + high / 2];
      const middle = (x1 + x2) / 2;
      const speed = `${bytes(member.rate)}/s`;
      parts.push(
        draw("path", { class: "edge", d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2 - 6},${y2}` }),
        draw("path", { class: "head", d: `M${x2},${y2} l-8,-4 v8 z` }),
        draw("text", { class: "speed", x: x2 - 10, y: y2 - 16, "text-anchor": "end" }, speed),
        draw("text", { class: "speed", x: x2 - 10, y: y2 - 5, "text-anchor": "end" }, shown(member.by)));
    }
    const lines = [member.name, `${member.state}, version ${shown(member.version)}`, member.node ?? ""];
    const short = (text) => (text.length > 23 ? `${text.slice(0, 22)}…` : text);
    parts.push(
      draw("rect", { class: `box ${member.state}`, x, y, width: wide, height: high, rx: 6 }),
      ...lines.map((line, row) =>
        draw("text", { class: row === 0 ? "name" : "detail", x: x + 8, y: y + 17 + row * 14 }, draw("title", {}, line), short(line))));
  }
  const label = members.filter((member) => member.from !== null)
    .map((member) => `${member.name} received from ${member.from} at ${bytes(member.rate)} a second`).join("; ");
  const picture = draw("svg", { class: "topology", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...parts);
  const scroll = make("div", { class: "scroll" }, picture);
  scroll.tabIndex = 0;
  return scroll;
}

function members(object) {
  const row = (member) =>
    make("tr", {},
      make("td", {}, member.name),
      make("td", { class: member.state }, member.state),
      make("td", { class: "number" }, ranks(member)),
      make("td", { class: "number" }, shown(member.version)),
      make("td", { class: "number" }, member.rate === null ? "–" : `${bytes(member.rate)}/s`),
      make("td", {}, shown(member.from)),
      make("td", {}, member.reason),
      make("td", {}, member.message));
  return table("Members", ["member", "state", "ranks", "version", "speed", "from", "reason", "message"], object.members.map(row));
}

// The phases of one attempt in one bar, on the scale of the longest attempt on the page.
function bar(update, longest) {
  const name = update.phases.map(([phase, ms]) => `${phase} ${ms} ms`).join(", ");
  const svg = draw("svg", { class: "phases", viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": name });
  let at = 0;
  for (const [phase, ms] of update.phases) {
    const width = longest > 0 ? (ms / longest) * 1000 : 0;
    const place = { x: at.toFixed(2), y: "2", width: Math.max(width, 1).toFixed(2), height: "16" };
    svg.append(draw("rect", { class: PHASES.includes(phase) ? phase : "other", ...place }, draw("title", {}, `${phase} ${ms} ms`)));
    at += width;
  }
  return svg;
}

const total = (update) => update.phases.reduce((sum, [, ms]) => sum + ms, 0);

function timeline(object) {
  if (object.updates.length === 0) return make("p", { class: "soft" }, "no update since this program started to follow the group");
  const longest = Math.max(...object.updates.map(total));
  const received = (update) => update.received.map((one) => `${one.member}: ${bytes(one.bytes)}${one.installed ? "" : ", not installed"}`);
  const row = (update) =>
    make("tr", {},
      make("td", { class: "number" }, clock(update.begun)),
      make("td", { class: "number" }, `${update.version}${update.feeding ? " (feeding)" : ""}`),
      make("td", { class: "number" }, `${update.epoch}/${update.attempt}`),
      make("td", { class: update.phase === "Done" ? "done" : update.phase === "Failed" ? "failed" : "updating", title: received(update).join("\n") },
        update.phase === "Done" ? `${update.installed}/${update.members}` : update.phase),
      make("td", { class: "number" }, `${total(update)} ms`),
      make("td", { class: "number" }, bytes(update.bytes)),
      make("td", {}, bar(update, longest), update.failure === null ? null : make("span", { class: "failed" }, update.failure)));
  return table("Last updates", ["begun", "version", "epoch/attempt", "installed", "time", "bytes", "phases"], object.updates.map(row));
}

function events(object) {
  if (object.events.length === 0) return make("p", { class: "soft" }, "no event since this program started to follow the group");
  const row = (event) =>
    make("tr", {},
      make("td", { class: "number" }, clock(event.at)),
      make("td", { class: event.warning ? "failed" : "" }, event.reason),
      make("td", { class: "name" }, shown(event.member)),
      make("td", {}, event.message));
  return table("Last events", ["time", "reason", "member", "message"], object.events.map(row));
}

function conditions(object) {
  // Degraded and Progressing are good when they are False.
  const good = (condition) => (condition.status === "True") !== ["Degraded", "Progressing"].includes(condition.type);
  const items = object.conditions.map((condition) =>
    make("li", { class: good(condition) ? "true" : condition.type === "Progressing" ? "updating" : "false", title: condition.message },
      `${condition.type}=${condition.status} ${condition.reason}`));
  return make("ul", { class: "conditions" }, ...items);
}

function legend() {
  const parts = PHASES.flatMap((phase) => [make("span", { class: `legend ${phase}` }), phase]);
  return make("h3", {}, "Last updates", ...parts);
}

function section(object) {
  const facts = [
    `${object.ready} of ${object.total} replicas ready, minReady is ${object.minReady}`,
    `version ${shown(object.version)}`,
    `epoch ${object.epoch}`,
    `world size ${object.worldSize}`,
    `transport ${shown(object.transport)}`,
  ];
  if (object.suspended) facts.push("suspended");
  const picture = topology(object);
  const element = make("section", {},
    make("h2", {}, `${object.namespace}/${object.name}`),
    make("p", { title: shown(object.transportReason) }, facts.join(" · ")),
    conditions(object),
    picture === null ? null : make("h3", {}, "Last transfers"),
    picture,
    make("h3", {}, "Members"),
    members(object),
    legend(),
    timeline(object),
    make("h3", {}, "Last events"),
    events(object));
  element.dataset.object = `${object.namespace}/${object.name}`;
  return element;
}

// A new drawing keeps the place to which each table was scrolled, and the focus.
function replace(sections) {
  const place = document.getElementById("objects");
  const scrolls = () => [...place.querySelectorAll(".scroll")];
  const before = scrolls().map((element) => [element.scrollLeft, element === document.activeElement]);
  place.replaceChildren(...sections);
  const after = scrolls();
  if (after.length !== before.length) return;
  after.forEach((element, at) => {
    element.scrollLeft = before[at][0];
    if (before[at][1]) element.focus({ preventScroll: true });
  });
}

function show(state) {
  const about = document.getElementById("about");
  about.classList.remove("lost");
  const more = state.total > state.objects.length ? `, the first ${state.objects.length} are shown` : "";
  about.textContent = state.leads
    ? `${state.total} object${state.total === 1 ? "" : "s"}${more} · ${state.pod} · ${state.program}`
    : `${state.pod} does not lead: open the page of the controller that holds the lease`;
  replace(state.objects.map(section));
}

async function look() {
  try {
    const answer = await fetch("/ui/state", { signal: AbortSignal.timeout(DEADLINE) });
    if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    const about = document.getElementById("about");
    about.classList.add("lost");
    about.textContent = `no answer (${error.message}); the data below is old`;
  }
  setTimeout(look, PERIOD);
}

look();
