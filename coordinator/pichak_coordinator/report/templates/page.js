"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const drawn = new Map();

  // Paper has a width of its own; a figure that was drawn for the screen does not follow it.
  const PAPER = { chart: 310, matrix: 640, height: 215 };
  let paper = false;

  // -- charts ---------------------------------------------------------------------------------

  function theme() {
    // What is drawn for paper is drawn before its style sheet holds; the first rule of all is light.
    const style = paper
      ? document.styleSheets[0].cssRules[0].style
      : getComputedStyle(document.documentElement);
    const is = (name) => style.getPropertyValue("--" + name).trim();
    return {
      color: (name) => is(name.slice(1)),
      heat: [[0, is("heat-low")], [0.5, is("heat-mid")], [1, is("heat-high")]],
      text: is("text"), muted: is("muted"), grid: is("grid"), bg: is("bg"),
    };
  }

  // A colour is written as $name; it stands under keys that end in "color" or are "colorscale".
  function painted(value, key, colors) {
    if (Array.isArray(value)) return value.map((item) => painted(item, key, colors));
    if (value && typeof value === "object") {
      const made = {};
      for (const name of Object.keys(value)) made[name] = painted(value[name], name, colors);
      return made;
    }
    if (typeof value === "string" && value.startsWith("$")) {
      if (key === "colorscale") return colors.heat;
      if (key.endsWith("color")) return colors.color(value);
    }
    return value;
  }

  function layoutOf(figure, colors, wide) {
    const made = painted(figure.layout, "", colors);
    const axis = { gridcolor: colors.grid, zerolinecolor: colors.grid, linecolor: colors.grid, fixedrange: true };
    made.xaxis = Object.assign({ automargin: true }, axis, made.xaxis);
    made.yaxis = Object.assign({ automargin: true }, axis, made.yaxis);
    // So low a chart needs more of itself between its axis and its legend.
    if (paper && made.legend) {
      made.legend.y = -0.55;
      made.xaxis.tickangle = 0;
      made.xaxis.nticks = 4;
    }
    return Object.assign(
      {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colors.text, size: paper && !wide ? 10 : 12, family: "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif" },
        autosize: !paper,
        width: paper ? (wide ? PAPER.matrix : PAPER.chart) : undefined,
        height: paper && !wide ? PAPER.height : undefined,
        margin: { l: 10, r: 10, t: wide ? 10 : 26, b: 10, pad: 4 },
        hoverlabel: { bgcolor: colors.bg, bordercolor: colors.muted, font: { color: colors.text }, align: "left", namelength: -1 },
      },
      made
    );
  }

  const config = { displayModeBar: false, responsive: true, showTips: false, doubleClick: false, scrollZoom: false };

  function draw(place) {
    const figure = figures[place.id];
    if (!figure || !window.Plotly) return;
    const colors = theme();
    const data = painted(figure.data, "", colors);
    const layout = layoutOf(figure, colors, place.classList.contains("matrix"));
    if (drawn.has(place)) window.Plotly.react(place, data, layout, config);
    else window.Plotly.newPlot(place, data, layout, config);
    drawn.set(place, true);
  }

  const visible = (place) => place.getClientRects().length > 0;
  const places = [...document.querySelectorAll(".plot")];
  const watcher = new IntersectionObserver(
    (seen) => {
      for (const each of seen)
        if (each.isIntersecting && !drawn.has(each.target)) draw(each.target);
    },
    { rootMargin: "400px" }
  );
  places.forEach((place) => watcher.observe(place));
  const redraw = () => places.filter((place) => drawn.has(place) && visible(place)).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // On paper: what is open is drawn, in the light colours and at the page's width; a small fleet is
  // opened for it.
  let opened = [];
  const groups = [...document.querySelectorAll(".device .charts")];
  const followers = groups.map((group) => group.nextElementSibling);
  function toPaper() {
    if (paper) return;
    const closed = [...document.querySelectorAll("details.device:not([open])")];
    if (document.querySelectorAll("details.device").length <= 20) {
      opened = closed;
      opened.forEach((each) => (each.open = true));
    }
    paper = true;
    // The plan, whose lines fill what is left of a page, goes before the charts.
    groups.forEach((group) => group.parentNode.append(group));
    places.filter(visible).forEach(draw);
  }
  function fromPaper() {
    if (!paper) return;
    paper = false;
    groups.forEach((group, number) => followers[number].before(group));
    opened.forEach((each) => (each.open = false));
    opened = [];
    redraw();
  }
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);
  matchMedia("print").addEventListener("change", (query) => (query.matches ? toPaper() : fromPaper()));

  // -- sections -------------------------------------------------------------------------------

  function openTarget() {
    const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (place && place.tagName === "DETAILS") {
      place.open = true;
      place.scrollIntoView();
    }
  }
  addEventListener("hashchange", openTarget);
  if (location.hash) openTarget();

  // -- table ----------------------------------------------------------------------------------

  const table = document.getElementById("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const order = new Map(rows.map((row, number) => [row, number]));
  const heads = [...table.tHead.rows[0].cells];

  function sortBy(column, falling) {
    const numbers = rows.every((row) => {
      const key = row.cells[column].dataset.k;
      return key === "" || row.cells[column].classList.contains("n");
    });
    const key = (row) => row.cells[column].dataset.k;
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      // What was not measured is last in both directions.
      if (x === "" || y === "") return (x === "") - (y === "") || order.get(a) - order.get(b);
      const by = numbers ? Number(x) - Number(y) : x.localeCompare(y, undefined, { numeric: true });
      return (falling ? -by : by) || order.get(a) - order.get(b);
    };
    const sorted = [...rows].sort(compare);
    const parts = document.createDocumentFragment();
    sorted.forEach((row) => parts.appendChild(row));
    body.appendChild(parts);
  }

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const numeric = rows.some((row) => row.cells[column].classList.contains("n") && row.cells[column].dataset.k !== "");
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const next = now === first ? second : first;
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      sortBy(column, next === "descending");
    });
  });

  const filter = document.getElementById("filter");
  const only = document.getElementById("only");
  const shown = document.getElementById("shown");
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  function choose() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const bad = row.classList.contains("fail") || row.classList.contains("warn") || row.classList.contains("failed");
      const fits = words.every((word) => texts.get(row).includes(word));
      const wanted = !only.value || (only.value === "bad") === bad;
      row.hidden = !(fits && wanted);
      count += fits && wanted;
    }
    shown.textContent = count === rows.length ? count + (count === 1 ? " device" : " devices") : count + " of " + rows.length + " devices";
  }
  filter.addEventListener("input", choose);
  only.addEventListener("change", choose);
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
  choose();
})();
