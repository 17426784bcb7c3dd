"""The one site file, whole."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from joulery.config.carbon import CarbonConfig
from joulery.config.fleet import FleetConfig
from joulery.config.jobs import ClusterConfig, JobsConfig
from joulery.config.language import LanguageFamilyConfig, LanguageModelConfig
from joulery.config.loadgen import LoadConfig
from joulery.config.meters import MetersConfig
from joulery.config.parsing.problem import problem
from joulery.config.parsing.section import Name, Section
from joulery.config.plan import PlanSection
from joulery.config.services import CloverPolicy, ServiceConfig, SplitPolicy, unique
from joulery.config.serving import RayEngine, ServingConfig


class Mode(StrEnum):
    """Mode of operation: how far joulery may go."""

    ADVISE = "advise"
    """Say what it would do."""
    SHADOW = "shadow"
    """Run what it would do beside what runs, without answering from it."""
    ACT = "act"
    """Do it."""


class Site(Section):
    """The configuration of one site. Relative paths start at the site file's folder."""

    joulery: Literal[1]
    """Version of this format: 1."""
    name: Name = "site"
    """Name of the site in reports."""
    mode: Annotated[Mode, Field(strict=False)] = Mode.ADVISE
    """advise, shadow or act."""
    pue: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.0
    """Facility energy per IT energy; 1 counts the machines alone."""
    carbon: CarbonConfig | None = None
    """Source of the carbon intensity; without it no grams are counted."""
    meters: MetersConfig = Field(default_factory=MetersConfig)
    """Meters that read the energy."""
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    """The devices joulery may use."""
    services: tuple[ServiceConfig, ...] = ()
    """The services."""
    language_models: tuple[LanguageModelConfig, ...] = ()
    """Models that write text, served over the OpenAI API by joulery up and serve."""
    language_families: tuple[LanguageFamilyConfig, ...] = ()
    """Language models behind one name: the grid, the SLO and an accuracy floor choose which of them answers."""
    plan: PlanSection = Field(default_factory=PlanSection)
    """Settings with which joulery plan provisions the services."""
    serving: ServingConfig = Field(default_factory=ServingConfig)
    """Address and settings of the gateway."""
    jobs: JobsConfig | None = None
    """Training jobs."""
    clusters: tuple[ClusterConfig, ...] = ()
    """Several clusters, each with its jobs, instead of jobs."""
    load: LoadConfig | None = None
    """Load that joulery up sends to its own gateway, to one service; other services may have a load of their own."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Site:
        names = [service.name for service in self.services]
        unique(names, ("services",))
        unique([model.name for model in self.language_models], ("language_models",))
        governed = (*names, *(model.name for model in self.language_models))
        governing = {
            "clocks": [clock.services for clock in self.fleet.clocks],
            "power_limits": [limit.services for limit in self.fleet.power_limits],
        }
        for key, index, each in ((key, *one) for key, lists in governing.items() for one in enumerate(lists)):
            for name in each:
                if name not in governed:
                    at = ("fleet", key, index, "services")
                    raise problem(f"there is no {name} in this site", expected=", ".join(governed) or "a name", at=at)
        if self.load is not None and self.load.service not in (None, *names):
            raise problem(
                "is not a service of this site", expected=", ".join(names) or "a service", at=("load", "service")
            )
        aimed = self._aim
        if aimed is not None and self.service(aimed).load is not None:
            raise problem(f"service {aimed} has a load of its own", hint="keep one of the two", at=("load",))
        self._groups_fit()
        self._splits_can_be_kept()
        self._nodes_can_be_used()
        self._families_have_their_models()
        self._clusters_are_apart()
        return self

    def _clusters_are_apart(self) -> None:
        """Clusters have names and state folders of their own."""
        unique([cluster.name for cluster in self.clusters], ("clusters",))
        if self.clusters and self.jobs is not None:
            raise problem("is one cluster's, and clusters lists others", hint="list it under clusters", at=("jobs",))
        states: dict[str, str] = {}
        for number, cluster in enumerate(self.clusters):
            at = ("clusters", number, "jobs")
            own = cluster.jobs.slurm.cluster
            if own not in (None, cluster.name):
                raise problem("is not the entry's name", expected=cluster.name, at=(*at, "slurm", "cluster"))
            if "state" not in cluster.jobs.model_fields_set:
                continue
            if (other := states.setdefault(str(cluster.jobs.state), cluster.name)) != cluster.name:
                raise problem(f"is the state folder of cluster {other}", hint="give each its own", at=(*at, "state"))

    def _families_have_their_models(self) -> None:
        """Each model of a language family is listed, and no name stands for two things."""
        models = [model.name for model in self.language_models]
        taken = {*models, *(alias for model in self.language_models for alias in model.aliases)}
        for number, family in enumerate(self.language_families):
            if family.name in taken:
                raise problem("is the name of another language model", at=("language_families", number, "name"))
            taken.add(family.name)
            for index, one in enumerate(family.variants):
                if one.model not in models:
                    known = ", ".join(models) or "nothing there yet"
                    at = ("language_families", number, "variants", index, "model")
                    raise problem("is not listed under language_models", expected=known, at=at)

    def _splits_can_be_kept(self) -> None:
        """Requests are steered in mode act alone, and by the engines that load several variants in a replica."""
        for number, service in enumerate(self.services):
            at = ("services", number, "policy", "kind")
            if not isinstance(service.policy, SplitPolicy):
                continue
            if self.mode is not Mode.ACT:
                hint = "mode: act; or kind: fixed"
                raise problem(f"splits requests in mode act only, and the mode is {self.mode}", hint=hint, at=at)
            if isinstance(self.serving.engine, RayEngine):
                hint = "serving: {engine: {kind: embedded}}; or kind: fixed"
                raise problem("splits requests on the embedded engine and on upstreams, not on Ray", hint=hint, at=at)

    def _nodes_can_be_used(self) -> None:
        """The nodes of a Ray cluster serve services on their cores or GPUs, which the services share equally."""
        engine = self.serving.engine
        if not isinstance(engine, RayEngine) or not engine.nodes:
            return
        at = ("serving", "engine", "nodes")
        if self.fleet.cpu is not None or any(service.cpu is not None for service in self.services):
            raise problem("have the cores of the replicas", hint="leave out fleet.cpu and the services' cpu", at=at)
        if self.fleet.devices:
            raise problem("have GPUs of their own (gpus)", hint="leave out fleet.devices, or nodes", at=at)
        for number, service in enumerate(self.services):
            if service.profile is None and engine.nodes[0].gpus is not None:
                hint = "run joulery profile on a machine with such a GPU, and name its file"
                raise problem(
                    "is missing: GPUs of the nodes are not measured here", hint=hint, at=("services", number, "profile")
                )
        never = [one for one in self.services if not (isinstance(one.policy, CloverPolicy) and one.policy.consolidate)]
        for index, node in enumerate(engine.nodes):
            if node.sleep is not None and never:
                hint = f"policy: {{kind: clover, consolidate: true}} of {never[0].name}"
                raise problem("is of a node that is never left empty", hint=hint, at=(*at, index, "sleep"))

    def _groups_fit(self) -> None:
        """Each service's GPUs are listed, and its own unless GPUs may be shared."""
        listed = [device.gpu for device in self.fleet.devices]
        owner: dict[int | str, str] = {}
        for number, service in enumerate(self.services):
            for index, gpu in enumerate(service.gpus or ()):
                at = ("services", number, "gpus", index)
                if gpu not in listed:
                    known = ", ".join(map(str, listed)) or "nothing there yet"
                    raise problem("is not listed under fleet.devices", expected=known, at=at)
                if gpu in owner and not self.plan.colocate:
                    raise problem(
                        f"service {owner[gpu]} has that GPU; GPU groups do not overlap",
                        hint="give each GPU to one service, or let services share GPUs: plan: {colocate: true}",
                        at=at,
                    )
                owner[gpu] = service.name

    @property
    def _aim(self) -> str | None:
        """The service that the site's own load goes to."""
        if self.load is None or not self.services:
            return None
        return self.load.service or self.services[0].name

    def load_of(self, service: ServiceConfig) -> LoadConfig | None:
        """The load sent to a service; None for nothing."""
        return self.load if service.name == self._aim else service.load

    def service(self, name: str) -> ServiceConfig:
        """The service called ``name``.

        Raises:
            KeyError: There is none.
        """
        for service in self.services:
            if service.name == name:
                return service
        raise KeyError(name)
