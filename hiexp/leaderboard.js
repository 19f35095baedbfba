"use strict";
// The leaderboard page: sorts and filters its table, unpacks questions as they are opened. Whatever a model or a
// document wrote enters the page as text (textContent), never as markup. Nothing is loaded from anywhere.

const BY_SOURCE = ["prompt", "experience", "policy", "document", "notice"];
const RIGHT = 0.5, PER_PAGE = 40;
const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function unpack(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const unpacked = new Map();
function chunk(id) {
  if (!unpacked.has(id)) unpacked.set(id, unpack(id));
  return unpacked.get(id);
}

function sortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.v;
      const numeric = head.dataset.kind === "number";
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");  // what was not measured stays below
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return down ? -order : order;
      });
      body.append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}

function filterRows(table, input, count) {
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${table.tBodies[0].rows.length} arms`;
  };
  input.addEventListener("input", apply);
  apply();
}

function options(select, names, first) {
  select.replaceChildren();
  if (first !== undefined) select.append(new Option(first, ""));
  names.forEach((name, place) => select.append(new Option(name, String(place))));
}

function mark(score) {
  const className = score === null ? "soft" : score >= RIGHT ? "good" : "bad";
  return element("span", className, score === null ? "-" : String(Math.round(100 * score)));
}

function attemptView(name, attempt) {
  const box = element("div", "attempt"), head = element("header");
  head.append(element("b", "", name));
  const right = attempt.scores.length && attempt.scores[0][1] >= RIGHT;  // by the leading metric
  head.append(element("span", right ? "good" : "bad", attempt.prediction || attempt.status.replaceAll("_", " ")), " ");
  head.append(element("span", "soft", attempt.facts));
  box.append(head);
  const why = element("ul", "why");
  for (const line of attempt.why) why.append(element("li", "", line));
  box.append(why);
  for (const [title, pieces] of attempt.calls) {
    if (title) box.append(element("p", "soft", title));
    for (const [source, text] of pieces) {
      const piece = element("div", "seg " + (BY_SOURCE.includes(source) ? source : "notice"));
      piece.append(element("em", "", source), text);
      box.append(piece);
    }
  }
  if (!attempt.calls.length) box.append(element("p", "soft", "no trace was kept"));
  if (attempt.experience) box.append(element("p", "lineage", "experience shown: " + attempt.experience));
  return box;
}

function questionView(question, arms, scores) {
  const fold = element("details"), summary = element("summary");
  summary.append(element("b", "", question.text), " ");
  summary.append(element("span", "soft", "answer: " + question.golds.join(" | ")), " ");
  const marks = element("span", "marks");
  scores.forEach((score, place) => {
    const one = element("span", "tag");
    one.title = arms[place].name;
    one.append(`${place + 1}: `, mark(score));
    marks.append(one);
  });
  summary.append(marks);
  fold.append(summary);
  fold.addEventListener("toggle", async () => {
    if (!fold.open || fold.dataset.filled) return;
    fold.dataset.filled = "yes";
    fold.append(element("p", "soft", `id ${question.id}`));
    if (!question.chunk) {
      fold.append(element("p", "soft", "The traces of this question are left out: the page has reached its limit."));
      return;
    }
    const grid = element("div", "attempts");
    fold.append(grid);
    try {
      const details = (await chunk(question.chunk))[question.place];
      for (const [arm, attempts, left] of details) {
        for (const attempt of attempts) grid.append(attemptView(`${arm + 1}: ${arms[arm].name}`, attempt));
        if (left) grid.append(element("p", "soft", `${left} more attempts of ${arms[arm].name} are left out`));
      }
    } catch (error) {
      fold.append(element("p", "bad", `This browser cannot unpack the traces (${error}).`));
    }
  });
  return fold;
}

class Questions {
  constructor(sets) {
    this.sets = sets;
    this.page = 0;
    options(byId("set"), sets.map((set) => `${set.name} (${set.questions.length})`));
    for (const id of ["metric", "wrong", "right", "words"]) {
      byId(id).addEventListener("input", () => { this.page = 0; this.show(); });
    }
    byId("set").addEventListener("input", () => this.choose());
    byId("before").addEventListener("click", () => { this.page -= 1; this.show(); });
    byId("after").addEventListener("click", () => { this.page += 1; this.show(); });
    this.choose();
  }

  choose() {
    this.set = this.sets[Number(byId("set").value)];
    this.page = 0;
    const names = this.set.arms.map((arm, place) => `${place + 1}: ${arm.name}`);
    options(byId("metric"), this.set.metrics);
    options(byId("wrong"), names, "any");
    options(byId("right"), names, "any");
    byId("legend").replaceChildren(...names.map((name) => element("li", "", name)));
    this.show();
  }

  show() {
    const metric = Number(byId("metric").value), words = byId("words").value.toLowerCase();
    const wrong = byId("wrong").value, right = byId("right").value;
    const found = this.set.questions.filter((question) => {
      const scores = question.scores[metric];
      const isWrong = wrong === "" || (scores[wrong] !== null && scores[wrong] < RIGHT);
      const isRight = right === "" || (scores[right] !== null && scores[right] >= RIGHT);
      const text = `${question.id} ${question.text} ${question.golds.join(" ")}`.toLowerCase();
      return isWrong && isRight && text.includes(words);
    });
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const shown = found.slice(this.page * PER_PAGE, (this.page + 1) * PER_PAGE);
    byId("found").textContent = `${found.length} of ${this.set.questions.length} questions, page ${this.page + 1} of ${pages}`;
    byId("before").disabled = this.page === 0;
    byId("after").disabled = this.page === pages - 1;
    byId("list").replaceChildren(
      ...shown.map((question) => questionView(question, this.set.arms, question.scores[metric])));
  }
}

sortable(byId("arms"));
filterRows(byId("arms"), byId("filter"), byId("count"));
unpack("index").then((sets) => new Questions(sets)).catch((error) => {
  byId("found").textContent = `This browser cannot unpack the questions (${error}).`;
});
