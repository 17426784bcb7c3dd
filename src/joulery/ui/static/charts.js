// Draws the charts of a page with uPlot, in reports and on the dashboard alike, from the JSON of /api/now:
// {site, started_s, ticks}. A chart in between is plain data:
//   {x: [...], top?: 100, unit?: "mg", series: [{label, values, color, band?: [low, high], stacked?, dash?, step?, sparse?, suffix?}]}
// Colours are names of CSS variables, so that light and dark follow the reader's choice while the page is open.
"use strict";
const joulery = (() => {
  const HEIGHT = 220;
  const drawn = new Map();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const fade = (color, share) => color + Math.round(share * 255).toString(16).padStart(2, "0");

  function shorten(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    const digits = Math.max(0, 2 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en", {maximumFractionDigits: Math.min(digits, 9)});
  }

  function elapsed(seconds) {
    if (seconds < 120) return Math.round(seconds * 10) / 10 + " s";
    if (seconds < 7200) return Math.round(seconds / 6) / 10 + " min";
    return Math.round(seconds / 360) / 10 + " h";
  }

  // Running sums, so that stacked areas lie on one another; a gap in one is a gap in all.
  function stack(rows) {
    const sums = [];
    rows.forEach((row, i) => {
      sums.push(row.map((value, t) => (value === null || (i > 0 && sums[i - 1][t] === null)) ? null : value + (i > 0 ? sums[i - 1][t] : 0)));
    });
    return sums;
  }

  function columns(chart) {
    const data = [chart.x], bands = [], series = [{}];
    const stacked = chart.series.filter((one) => one.stacked);
    const sums = stack(stacked.map((one) => one.values));
    stacked.slice().reverse().forEach((one, i) => {
      const color = css(one.color);
      data.push(sums[stacked.length - 1 - i]);
      series.push({label: one.label, scale: "y", stroke: color, fill: color, width: 0, points: {show: false}, paths: uPlot.paths.stepped({align: -1})});
    });
    chart.series.filter((one) => !one.stacked).forEach((one) => {
      const color = css(one.color), scale = "y";
      const paths = one.step ? uPlot.paths.stepped({align: -1}) : undefined;
      if (one.band) {
        const edge = {scale, stroke: "transparent", width: 0, points: {show: false}, paths};
        data.push(one.band[1], one.band[0]);
        series.push({...edge, label: one.label + " high"}, {...edge, label: one.label + " low"});
        bands.push({series: [series.length - 2, series.length - 1], fill: fade(color, 0.22)});
      }
      data.push(one.values);
      series.push({label: one.label, scale, stroke: color, width: 2, dash: one.dash ? [6, 5] : undefined, paths, points: {show: Boolean(one.sparse), size: 5}, spanGaps: Boolean(one.sparse)});
    });
    return {data, bands, series};
  }

  function axis(scale, side, size, words) {
    return {
      scale, side, size, gap: 6, font: "13px system-ui, sans-serif", stroke: css("soft"), ticks: {show: false},
      grid: {show: scale === "y", stroke: css("grid"), width: 1}, values: (_, splits) => splits.map(words),
    };
  }

  function options(element, chart, parts) {
    const range = (_, low, high) => {
      if (low === null || high === null) return [0, chart.top || 1];
      return [Math.min(0, low), chart.top || high + Math.max((high - Math.min(0, low)) * 0.08, 1e-9)];
    };
    return {
      width: Math.max(240, element.clientWidth), height: HEIGHT, padding: [10, 14, 0, 0],
      series: parts.series, bands: parts.bands, axes: [axis("x", 2, 32, elapsed), axis("y", 3, 44, shorten)], legend: {show: false},
      scales: {x: {time: false}, y: {range}},
      cursor: {sync: {key: "joulery"}, y: false, drag: {x: false, y: false}, points: {size: 7}},
      hooks: {setCursor: [(plot) => readout(element, chart, plot)]},
    };
  }

  // The values under the pointer, written into the legend.
  function readout(element, chart, plot) {
    const legend = element.parentElement.querySelector(".legend");
    if (!legend) return;
    const at = plot.cursor.idx;
    legend.querySelectorAll("b").forEach((cell, i) => {
      const one = chart.series[i];
      cell.textContent = one && at !== null && at !== undefined ? " " + shorten(one.values[at]) + (one.suffix || "") : "";
    });
  }

  function draw(element, chart) {
    const old = drawn.get(element);
    if (old) old.plot.destroy();
    const parts = columns(chart);
    element.replaceChildren();
    drawn.set(element, {chart, plot: new uPlot(options(element, chart, parts), parts.data, element)});
  }

  // New data for a drawn chart; a new chart where there is none or its series changed.
  function update(element, chart) {
    const old = drawn.get(element);
    const shape = (one) => one.series.map((line) => line.label + line.color).join();
    if (!old || shape(old.chart) !== shape(chart)) return draw(element, chart);
    old.chart.x = chart.x;
    old.chart.series = chart.series;
    old.plot.setData(columns(chart).data);
    return undefined;
  }

  function redraw() { drawn.forEach((one, element) => draw(element, one.chart)); }

  function resize() {
    drawn.forEach((one, element) => one.plot.setSize({width: Math.max(240, element.clientWidth), height: HEIGHT}));
  }

  let pending = 0;
  window.addEventListener("resize", () => { clearTimeout(pending); pending = setTimeout(resize, 80); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // Values in the unit that gives them short numbers, and that unit.
  function scaled(columns, unit) {
    const top = Math.max(0, ...columns.flat().filter((value) => value !== null));
    const [factor, prefix] = [[1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]].find(([size]) => top >= size) || [1, ""];
    return {unit: prefix + unit, columns: columns.map((values) => values.map((value) => (value === null ? null : value / factor)))};
  }

  // The charts of a site by their name; figures of the page ask for them in data-chart.
  function chartsOf(view) {
    const ticks = view.ticks, x = ticks.map((tick) => tick.t_s - view.started_s);
    const column = (name) => ticks.map((tick) => tick[name]);
    const band = (low, high) => (high.some((value) => value !== null) ? [low, high] : undefined);
    const shift = (sign) => ticks.map((tick) => (tick.power_w === null || !tick.power_band_w ? tick.power_w : tick.power_w + sign * tick.power_band_w));
    const charts = new Map();
    charts.set("power", {x, series: [{label: "power", values: column("power_w"), color: "power", band: band(shift(-1), shift(1)), suffix: " W"}]});
    charts.set("intensity", {x, series: [{label: "intensity", values: column("g_per_kwh"), color: "grid-line", step: true, suffix: " g/kWh"}]});
    const grams = scaled([column("carbon_g"), column("baseline_g"), column("baseline_low_g"), column("baseline_high_g")], "g");
    charts.set("carbon", {x, unit: grams.unit, series: [
      {label: "as run", values: grams.columns[0], color: "ours", suffix: " " + grams.unit},
      {label: "baseline", values: grams.columns[1], color: "baseline", dash: true, suffix: " " + grams.unit, band: band(grams.columns[2], grams.columns[3])},
    ]});
    view.site.services.forEach((service, i) => {
      const served = ticks.map((tick) => tick.services.find((one) => one.service === service.name) || null);
      // Answers of a language model are rare and long: single points, in the unit that suits them.
      const seconds = [served.map((one) => one && one.latency_s !== null ? one.latency_s : null), x.map(() => service.slo_s)];
      const latency = service.language_model ? scaled(seconds, "s") : {unit: "ms", columns: seconds.map((values) => values.map((value) => value === null ? null : value * 1000))};
      charts.set("latency-" + i, {x, unit: latency.unit, series: [
        {label: "latency", values: latency.columns[0], color: "latency", sparse: service.language_model, suffix: " " + latency.unit},
        {label: "SLO", values: latency.columns[1], color: "slo", dash: true, suffix: " " + latency.unit},
      ]});
      charts.set("tokens-" + i, {x, series: [{label: "tokens", color: "v0", suffix: " /s",
        values: served.map((one, at) => one ? (one.tokens || 0) / ticks[at].period_s : null)}]});
      charts.set("mix-" + i, {x, top: 100, series: service.variants.map(([name], rank) => ({
        label: name, color: "v" + rank % 6, stacked: true, suffix: " %",
        values: served.map((one) => one && one.mix.length ? 100 * (one.mix.find(([other]) => other === name) || [name, 0])[1] : null),
      }))});
    });
    return charts;
  }

  function show(view) {
    const charts = chartsOf(view);
    document.querySelectorAll("[data-chart]").forEach((element) => {
      const chart = charts.get(element.dataset.chart);
      update(element, chart);
      if (chart.unit) element.parentElement.querySelector(".unit").textContent = chart.unit;
      const names = element.parentElement.querySelectorAll(".legend li");
      chart.series.forEach((one, i) => { if (names[i]) names[i].hidden = one.values.every((value) => value === null); });
    });
  }

  const recorded = document.getElementById("recorded");
  if (recorded) show(JSON.parse(recorded.textContent));
  return {show, shorten};
})();
