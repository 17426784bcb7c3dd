"""The paper's Alg. 1 and Alg. 2 written down line by line, deep copies and all: the oracle of preset ``igniter``.

Independent of the product: its own Eqs. 1-11 on the published JSON names, dictionaries throughout, everything
recomputed on every try. Also what the benchmark runs side by side.
"""

import copy
import math


def predict(gpu, hardware, models):
    """t_inf of every workload on a GPU (Eqs. 1-11): list of dicts with id, model, batch, share."""
    solo = []
    for w in gpu:
        m = models[w["model"]]
        k_act = (m["k1"] * w["batch"] ** 2 + m["k2"] * w["batch"] + m["k3"]) / (w["share"] + m["k4"]) + m["k5"]
        ability = 1000 * w["batch"] / k_act
        solo.append(
            {
                "k_act": k_act,
                "power": m["alpha_power"] * ability + m["beta_power"],
                "cache": m["alpha_cacheutil"] * ability + m["beta_cacheutil"],
            }
        )
    power = hardware["p_idle"] + sum(s["power"] for s in solo)
    frequency = hardware["F"]
    if power > hardware["P"]:
        frequency = hardware["F"] + hardware["alpha_f"] * (power - hardware["P"])
    delay = 0 if len(gpu) <= 1 else hardware["alpha_sch"] * len(gpu) + hardware["beta_sch"]
    cache = sum(s["cache"] for s in solo)
    times = []
    for w, s in zip(gpu, solo, strict=True):
        m = models[w["model"]]
        t_sch = m["t_sch_solo_total"] + m["n_k"] * delay
        t_act = s["k_act"] * (1 + m["alpha_cache"] * (cache - s["cache"]))
        t_gpu = (t_sch + t_act) / (frequency / hardware["F"])
        t_load = m["d_load"] * w["batch"] / hardware["B_pcie"]
        t_feedback = m["d_feedback"] * w["batch"] / hardware["B_pcie"]
        times.append(t_load + t_gpu + t_feedback)
    return times


def theorem_1(w, hardware, models):
    """b_appr and r_lower (Eqs. 17-18)."""
    m, bandwidth, half, rate = models[w["model"]], hardware["B_pcie"], w["slo_ms"] / 2, w["rate_rps"] / 1000
    batch = math.ceil(half * rate * bandwidth / (bandwidth + rate * m["d_load"]))
    gamma = m["k1"] * batch**2 + m["k2"] * batch + m["k3"]
    delta = half - (m["d_load"] + m["d_feedback"]) * batch / bandwidth - m["k5"] - m["t_sch_solo_total"]
    unit = hardware["r_unit"]
    return batch, math.ceil((gamma / delta - m["k4"]) / unit) * unit


def alloc_gpus(gpu, new, hardware, models):
    """Alg. 2 on a copy of the GPU; None when the shares exceed it."""
    gpu = copy.deepcopy(gpu)
    gpu.append(copy.deepcopy(new))
    while sum(w["share"] for w in gpu) <= 100:
        times = predict(gpu, hardware, models)
        late = [w for w, t in zip(gpu, times, strict=True) if t > w["slo_ms"] / 2]
        if not late:
            return gpu
        for w in late:
            w["share"] += hardware["r_unit"]
    return None


def igniter(workloads, hardware, models):
    """Alg. 1: list of GPUs, each a list of workloads with batch and share."""
    sized = []
    for w in workloads:
        batch, lower = theorem_1(w, hardware, models)
        sized.append({**w, "batch": batch, "share": lower})
    sized.sort(key=lambda w: w["share"], reverse=True)
    gpus = [[]]
    for w in sized:
        chosen, least = -1, 101
        for j, gpu in enumerate(gpus):
            tried = alloc_gpus(gpu, w, hardware, models)
            if tried is None:
                continue
            increased = sum(x["share"] for x in tried) - sum(x["share"] for x in gpu)
            if increased < least:
                chosen, least, best = j, increased, tried
        if chosen == -1:
            gpus.append([w])
        else:
            gpus[chosen] = best
    return gpus
