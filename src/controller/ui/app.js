// Draws /ui/state every two seconds. Text from the cluster is set as text, never as markup.
"use strict";

const PERIOD = 2000;
const DEADLINE = 5000;
const PHASES = ["begin", "transfer", "verify", "activate"];
const SVG = "http://www.w3.org/2000/svg";

function make(name, options = {}, ...children) {
  const element = document.createElement(name);
  if (options.class) element.className = options.class;
  if (options.title) element.title = options.title;
  element.append(...children.filter((child) => child !== null));
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

function table(heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", {}, text)));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function ranks(member) {
  if (member.rankOffset === null) return `– (${member.size})`;
  return member.size === 1 ? `${member.rankOffset}` : `${member.rankOffset}–${member.rankOffset + member.size - 1}`;
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
  return table(["member", "state", "ranks", "version", "speed", "from", "reason", "message"], object.members.map(row));
}

// The phases of one attempt in one bar, on the scale of the longest attempt on the page.
function bar(update, longest) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 1000 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", update.phases.map(([name, ms]) => `${name} ${ms} ms`).join(", "));
  let at = 0;
  for (const [name, ms] of update.phases) {
    const width = longest > 0 ? (ms / longest) * 1000 : 0;
    const part = document.createElementNS(SVG, "rect");
    part.setAttribute("class", PHASES.includes(name) ? name : "other");
    part.setAttribute("x", at.toFixed(2));
    part.setAttribute("y", "2");
    part.setAttribute("width", Math.max(width, 1).toFixed(2));
    part.setAttribute("height", "16");
    const title = document.createElementNS(SVG, "title");
    title.textContent = `${name} ${ms} ms`;
    part.append(title);
    svg.append(part);
    at += width;
  }
  return svg;
}

const total = (update) => update.phases.reduce((sum, [, ms]) => sum + ms, 0);

function timeline(object) {
  if (object.updates.length === 0) return make("p", { class: "soft" }, "no update since this controller became the leader");
  const longest = Math.max(...object.updates.map(total));
  const row = (update) =>
    make("tr", {},
      make("td", { class: "number" }, new Date(update.begun).toLocaleTimeString()),
      make("td", { class: "number" }, `${update.version}${update.feeding ? " (feeding)" : ""}`),
      make("td", { class: "number" }, `${update.epoch}/${update.attempt}`),
      make("td", { class: update.phase === "Done" ? "done" : update.phase === "Failed" ? "failed" : "updating", title: shown(update.failure) },
        update.phase === "Done" ? `${update.installed}/${update.members}` : update.phase),
      make("td", { class: "number" }, `${total(update)} ms`),
      make("td", { class: "number" }, bytes(update.bytes)),
      make("td", {}, bar(update, longest), update.failure === null ? null : make("span", { class: "failed" }, update.failure)));
  return table(["begun", "version", "epoch/attempt", "installed", "time", "bytes", "phases"], object.updates.map(row));
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
  const element = make("section", {},
    make("h2", {}, `${object.namespace}/${object.name}`),
    make("p", { title: shown(object.transportReason) }, facts.join(" · ")),
    conditions(object),
    make("h3", {}, "Members"),
    members(object),
    legend(),
    timeline(object));
  element.dataset.object = `${object.namespace}/${object.name}`;
  return element;
}

function draw(state) {
  const about = document.getElementById("about");
  about.classList.remove("lost");
  const more = state.total > state.objects.length ? `, the first ${state.objects.length} are shown` : "";
  about.textContent = state.leads
    ? `${state.total} object${state.total === 1 ? "" : "s"}${more} · ${state.pod} · ${state.program}`
    : `${state.pod} does not lead: open the page of the controller that holds the lease`;
  document.getElementById("objects").replaceChildren(...state.objects.map(section));
}

async function look() {
  try {
    const answer = await fetch("/ui/state", { signal: AbortSignal.timeout(DEADLINE) });
    if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
    draw(await answer.json());
  } catch (error) {
    const about = document.getElementById("about");
    about.classList.add("lost");
    about.textContent = `the controller cannot be reached (${error.message}); the data below is old`;
  }
  setTimeout(look, PERIOD);
}

look();
