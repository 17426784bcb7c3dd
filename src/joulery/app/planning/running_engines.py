"""``joulery up --plan`` with a plan of language models: compare the site's engines with the plan.

joulery does not start these engines: the plan prints the command of each. The settings that an engine reports are
compared with the plan once, at the start; settings that it does not report are named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from joulery.app.serving.llm import upstream_of
from joulery.config.language import UpstreamConfig
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.domain.gpu.language_plan import PlannedEngine, ServedModel
from joulery.policies.placement.language.as_planned import EngineCheck, check_engines, missing
from joulery.store.plans import read_plan

LANGUAGE_KIND = "language"


def is_language_plan(file: Path | None) -> bool:
    """Whether a file is a plan of language models.

    Raises:
        DataError: The file is not a plan.
    """
    return file is not None and read_plan(file).kind == LANGUAGE_KIND


def planned_engines(site: Site, file: Path) -> tuple[PlannedEngine, ...]:
    """Read the engines of a plan of language models, for a site that names a server of at least one.

    Raises:
        ConfigError: The site names no server of a language model.
        DataError: The file is not such a plan.
    """
    if not any(isinstance(one.engine, UpstreamConfig) for one in site.language_models):
        raise ConfigError(
            "the plan is one of language models, and the site names no server of one",
            pointer="language_models",
            expected="such as {name: chat, engine: {kind: openai, dialect: vllm, url: http://HOST:8000, model: MODEL}}",
        )
    return read_plan(file).engines()


async def check_planned_llms(
    site: Site, file: Path, fact: Callable[[str, str], None], warn: Callable[[str], None]
) -> tuple[EngineCheck, ...]:
    """Compare the engines of a site with a plan of language models.

    Args:
        site: The site.
        file: The plan.
        fact: Shows a setting that is as planned.
        warn: Shows and keeps a difference from the plan.

    Raises:
        ConfigError: The site names no server of a language model.
        DataError: The file is not such a plan.
    """
    from joulery.adapters.engines.remote.served_model import served_model

    planned = planned_engines(site, file)
    upstreams = {
        one.name: upstream_of(one, one.engine) for one in site.language_models if isinstance(one.engine, UpstreamConfig)
    }
    served_models = await asyncio.gather(*(served_model(each) for each in upstreams.values()))
    served = {name: _with_stated(site, name, each) for name, each in zip(upstreams, served_models, strict=True)}
    checks = check_engines(planned, served)
    for each in checks:
        for message in each.differences:
            warn(f"{each.name}: {message}")
        unread = f"; it does not say {', '.join(each.unread)}" if each.unread else ""
        if not each.differences:
            fact("plan", f"{each.name}: {'as planned' if each.planned else 'not compared'}{unread}")
    for message in missing(planned, checks):
        warn(message)
    return checks


def _with_stated(site: Site, name: str, says: ServedModel) -> ServedModel:
    """A server's report, with the site's ``max_num_seqs`` where the report has none."""
    engine = next(one.engine for one in site.language_models if one.name == name)
    stated = "max_num_seqs" in engine.model_fields_set
    return says._replace(max_num_seqs=engine.max_num_seqs) if says.max_num_seqs is None and stated else says
