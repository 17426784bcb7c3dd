"""joulery: measure and lower the energy and carbon of machine learning.

The public names are imported when first used, so that ``import joulery`` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joulery.app.callbacks.huggingface import HuggingFaceCallback as HuggingFaceCallback
    from joulery.app.callbacks.lightning import LightningCallback as LightningCallback
    from joulery.app.callbacks.training_meter import TrainingJobMeter as TrainingJobMeter
    from joulery.app.measuring import measure as measure
    from joulery.app.measuring import measured as measured
    from joulery.app.measuring import trace as trace
    from joulery.app.python_api import account as account
    from joulery.app.python_api import plan as plan
    from joulery.app.python_api import report as report
    from joulery.app.python_api import simulate as simulate
    from joulery.app.windows import Meter as Meter
    from joulery.config import Site as Site
    from joulery.config import load as load
    from joulery.domain.decisions import Step as Step
    from joulery.domain.energy.carbon import CarbonSeries as CarbonSeries
    from joulery.domain.energy.footprint import Footprint as Footprint
    from joulery.domain.energy.power import PowerTrace as PowerTrace
    from joulery.domain.errors import JouleryError as JouleryError
    from joulery.domain.quality import Quality as Quality
    from joulery.runtime.measuring.block import Measurement as Measurement
    from joulery.runtime.measuring.terms import MeasureWarning as MeasureWarning

__version__ = "0.1.0"

#: public name -> the module that defines it
_EXPORTS: dict[str, str] = {
    "CarbonSeries": "joulery.domain.energy.carbon",
    "Footprint": "joulery.domain.energy.footprint",
    "TrainingJobMeter": "joulery.app.callbacks.training_meter",
    "JouleryError": "joulery.domain.errors",
    "MeasureWarning": "joulery.runtime.measuring.terms",
    "Measurement": "joulery.runtime.measuring.block",
    "Meter": "joulery.app.windows",
    "PowerTrace": "joulery.domain.energy.power",
    "Site": "joulery.config",
    "Quality": "joulery.domain.quality",
    "Step": "joulery.domain.decisions",
    "account": "joulery.app.python_api",
    "load": "joulery.config",
    "measure": "joulery.app.measuring",
    "measured": "joulery.app.measuring",
    "plan": "joulery.app.python_api",
    "report": "joulery.app.python_api",
    "simulate": "joulery.app.python_api",
    "trace": "joulery.app.measuring",
}

_CALLBACKS: dict[str, str] = {
    "HuggingFaceCallback": "joulery.app.callbacks.huggingface",
    "LightningCallback": "joulery.app.callbacks.lightning",
}
"""Names that import a training framework: ``from joulery import *`` leaves them out."""

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name) or _CALLBACKS.get(name)
    if module is None:
        raise AttributeError(f"module 'joulery' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_CALLBACKS})
