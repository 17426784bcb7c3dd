// The "Now" screen: asks /api/screen once for its frame, then /api/now and /api/decisions for what is new, and writes numbers
// into the frame. It knows no number of its own: what is null is shown as –.
"use strict";
(() => {
  const PERIOD_MS = 1000, PATIENCE_MS = 5000, MAX_TICKS = 900, MAX_DECISIONS = 50, UNKNOWN = "–";
  const byId = (id) => document.getElementById(id);
  const state = {view: null, decisions: [], lastContact: Date.now(), frame: null};

  // --- numbers for people -------------------------------------------------------------------------------------------
  const known = (value) => value !== null && value !== undefined;
  const unit = (value, name) => (known(value) ? joulery.shorten(value) + " " + name : UNKNOWN);
  const percent = (ratio, digits = 1) => (known(ratio) ? (ratio * 100).toFixed(digits) + " %" : UNKNOWN);
  function si(value, name) {
    if (!known(value)) return UNKNOWN;
    const size = Math.abs(value);
    for (const [factor, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]]) {
      if (size >= factor) return joulery.shorten(value / factor) + " " + prefix + name;
    }
    return "0 " + name;
  }
  function span(seconds) {
    if (seconds < 60) return Math.round(seconds) + " s";
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
    return hours ? hours + " h " + (minutes % 60) + " min" : minutes + " min " + Math.round(seconds % 60) + " s";
  }

  // --- writing into the frame ---------------------------------------------------------------------------------------
  function write(name, value, note, tone) {
    const cell = document.querySelector('[data-value="' + name + '"]');
    if (!cell) return;
    cell.textContent = value;
    cell.className = "value" + (tone ? " " + tone + "-text" : "");
    const words = document.querySelector('[data-note="' + name + '"]');
    if (words && note !== undefined) words.textContent = note;
  }

  function writeSite(view, tick) {
    const band = tick.power_band_w ? " ± " + unit(tick.power_band_w, "W") : "";
    write("power", unit(tick.power_w, "W"), known(tick.power_w) ? tick.quality + band : "no reading");
    const clock = known(tick.grid_s) ? ", " + new Date(tick.grid_s * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "";
    const carbon = view.site.carbon;
    write("intensity", unit(tick.g_per_kwh, "g/kWh"), carbon ? carbon.zone + " " + carbon.signal + clock : "no carbon source");
    const rate = known(tick.power_w) && known(tick.g_per_kwh) ? tick.power_w * tick.g_per_kwh / 1000 : null;
    write("rate", unit(rate, "g/h"), "CO2e at this power and intensity");
    write("total", si(tick.carbon_g, "g"), si(tick.energy_j, "J") + " in " + span(tick.t_s - view.started_s));
  }

  // Over the last minute, weighted by answers.
  function attainment(view, name) {
    const from = view.ticks[view.ticks.length - 1].t_s - 60;
    let within = 0, answers = 0;
    for (const tick of view.ticks) {
      const one = tick.t_s > from && tick.services.find((service) => service.service === name);
      if (one && known(one.attainment_ratio)) {
        answers += one.requests - one.failed;
        within += one.attainment_ratio * (one.requests - one.failed);
      }
    }
    return answers ? within / answers : null;
  }

  function writeService(view, tick, service, i) {
    const one = tick.services.find((other) => other.service === service.name) || {requests: 0, failed: 0, mix: []};
    const late = known(one.latency_s) && one.latency_s > service.slo_s;
    write("latency-" + i, known(one.latency_s) ? unit(one.latency_s * 1000, "ms") : UNKNOWN, undefined, late ? "bad" : "");
    const ratio = attainment(view, service.name), objective = service.quantile_ratio;
    write("attainment-" + i, percent(ratio), undefined, known(ratio) && ratio < objective ? "bad" : "good");
    const low = known(one.accuracy_ratio) && one.accuracy_ratio < service.minimum_accuracy_ratio;
    write("accuracy-" + i, percent(one.accuracy_ratio), undefined, low ? "bad" : "");
    write("rate-" + i, unit(one.requests / tick.period_s, "/s"), one.failed ? one.failed + " failed" : "none failed", one.failed ? "bad" : "");
    if (service.language_model) writeTokens(view, service, i); else writeMix(service, one, i);
  }

  // Over the last minute, for answers are rare; a token's energy is weighted by tokens, the latency is the latest known.
  function writeTokens(view, service, i) {
    const last = view.ticks[view.ticks.length - 1], from = last.t_s - 60, firsts = [];
    let tokens = 0, charged = 0, joules = 0, seconds = 0, requests = 0, failed = 0, latency = null;
    for (const tick of view.ticks) {
      const one = tick.t_s > from && tick.services.find((other) => other.service === service.name);
      if (!one) continue;
      seconds += tick.period_s;
      tokens += one.tokens;
      requests += one.requests;
      failed += one.failed;
      if (known(one.latency_s)) latency = one.latency_s;
      if (known(one.first_token_s)) firsts.push(one.first_token_s);
      if (known(one.energy_per_token_j)) { charged += one.tokens; joules += one.energy_per_token_j * one.tokens; }
    }
    write("latency-" + i, si(latency, "s"), undefined, known(latency) && latency > service.slo_s ? "bad" : "");
    write("rate-" + i, seconds ? unit(requests / seconds, "/s") : UNKNOWN, failed ? failed + " failed in the last minute" : "none failed", failed ? "bad" : "");
    firsts.sort((a, b) => a - b);
    write("first-token-" + i, firsts.length ? si(firsts[firsts.length >> 1], "s") : UNKNOWN);
    write("token-energy-" + i, charged ? si(joules / charged, "J") : UNKNOWN);
    write("tokens-" + i, seconds ? unit(tokens / seconds, "/s") : UNKNOWN);
  }

  function writeMix(service, one, i) {
    const bar = document.querySelector('[data-mix="' + i + '"]');
    const shares = service.variants.map(([name]) => (one.mix.find(([other]) => other === name) || [name, 0])[1]);
    let at = 0;
    bar.querySelectorAll("rect").forEach((rect, rank) => {
      rect.setAttribute("x", at * 1000);
      rect.setAttribute("width", shares[rank] * 1000);
      at += shares[rank];
    });
    const words = service.variants.map(([name], rank) => name + " " + percent(one.mix.length ? shares[rank] : null, 0));
    bar.setAttribute("aria-label", words.join(", "));
    bar.parentElement.querySelectorAll(".legend b").forEach((cell, rank) => {
      cell.textContent = " " + percent(one.mix.length ? shares[rank] : null, 0);
    });
  }

  function element(name, words, className) {
    const made = document.createElement(name);
    made.textContent = words;
    if (className) made.className = className;
    return made;
  }

  function describe(value) {
    if (Array.isArray(value)) return value.map(describe).join(", ");
    if (value !== null && typeof value === "object") return Object.entries(value).map(([key, inner]) => key + " " + describe(inner)).join(", ");
    return typeof value === "number" ? joulery.shorten(value) : String(value);
  }

  function writeDecisions(startedS) {
    const body = byId("decisions");
    body.replaceChildren(...state.decisions.slice().reverse().map((record) => {
      const row = document.createElement("tr"), decision = record.decision;
      const reason = element("td", decision.reason, "reason"), outcome = element("td", record.outcome);
      reason.append(element("div", "policy " + decision.policy, "note"));
      if (record.detail) outcome.append(element("div", record.detail, "note"));
      row.append(element("td", span(record.t_s - startedS), "number"), element("td", decision.kind + " " + decision.target),
        element("td", describe(decision.value)), reason, outcome);
      return row;
    }));
    byId("no-decisions").hidden = state.decisions.length > 0;
  }

  // --- asking -------------------------------------------------------------------------------------------------------
  async function ask(path) {
    const token = sessionStorage.getItem("joulery-token");
    const headers = token ? {Authorization: "Bearer " + token} : {};
    const answer = await fetch(path, {headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
    state.lastContact = Date.now();
    return answer;
  }

  function problem(words, bad) {
    const banner = byId("problem");
    banner.hidden = !words;
    banner.className = bad ? "banner bad" : "banner";
    if (banner.textContent !== words) banner.textContent = words;
  }

  function contact(words, tone) {
    const pill = byId("contact");
    pill.className = "pill " + tone;
    if (pill.textContent !== words) pill.textContent = words;
  }

  async function frame(view) {
    const answer = await ask("/api/screen");
    if (!answer.ok) return false;
    byId("screen").innerHTML = await answer.text();  // escaped by the server, and the policy runs no script but ours
    byId("labels").replaceChildren(...byId("screen").querySelectorAll("#label-source > *"));
    byId("site").textContent = view.site.name;
    document.title = view.site.name + " · joulery";
    state.frame = JSON.stringify(view.site);
    return true;
  }

  // New ticks are added to those that are there; another run starts afresh.
  function merge(fresh) {
    const old = state.view;
    const kept = old && old.started_s === fresh.started_s ? old.ticks.filter((tick) => !fresh.ticks.length || tick.t_s < fresh.ticks[0].t_s) : [];
    if (old && old.started_s !== fresh.started_s) state.decisions = [];
    return {...fresh, ticks: kept.concat(fresh.ticks).slice(-MAX_TICKS)};
  }

  function since(rows) { return rows.length ? "?since=" + rows[rows.length - 1].t_s : ""; }

  async function poll() {
    const answer = await ask("/api/now" + since(state.view ? state.view.ticks : []));
    if (answer.status === 401) return signIn();
    byId("sign-in").hidden = true;
    if (answer.status === 503) { contact("waiting", "warn"); return problem("The site is starting: no reading yet."); }
    if (!answer.ok) throw new Error("the gateway answers " + answer.status);
    const view = merge(await answer.json());
    if (state.frame !== JSON.stringify(view.site) && !(await frame(view))) return undefined;
    const news = await (await ask("/api/decisions" + since(state.decisions))).json();
    state.decisions = state.decisions.concat(news.decisions).slice(-MAX_DECISIONS);
    state.view = view;
    return show(view);
  }

  function show(view) {
    const tick = view.ticks[view.ticks.length - 1];
    writeDecisions(view.started_s);
    if (!tick) { contact("waiting", "warn"); return problem("The site is starting: no reading yet."); }
    writeSite(view, tick);
    view.site.services.forEach((service, i) => writeService(view, tick, service, i));
    joulery.show(view);
    const age = view.now_s - tick.t_s, stale = age > Math.max(5, 3 * tick.period_s);
    contact(stale ? "last reading " + span(age) + " ago" : "live", stale ? "warn" : "good");
    problem(view.warnings.join(" · "));
    return undefined;
  }

  function signIn() {
    contact("locked", "warn");
    problem(sessionStorage.getItem("joulery-token") ? "The gateway does not know this token." : "", true);
    byId("sign-in").hidden = false;
  }

  byId("sign-in").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("joulery-token", byId("token").value);
    byId("token").value = "";
    poll();
  });

  async function loop() {
    if (!document.hidden) {
      try {
        await poll();
      } catch (error) {
        const silent = Math.round((Date.now() - state.lastContact) / 1000);
        contact("no contact", "bad");
        problem("No contact with the gateway" + (silent > 1 ? " for " + span(silent) : "") + ": it has stopped, or " + error.message, true);
      }
    }
    setTimeout(loop, PERIOD_MS);
  }
  loop();
})();
