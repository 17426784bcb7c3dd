"""Which of this machine's GPUs each service of a site runs on."""

from __future__ import annotations

from joulery.app.wiring.gpus import LocalGpus
from joulery.config.serving import EmbeddedEngine
from joulery.config.site import Site
from joulery.domain.errors import ConfigError
from joulery.policies.placement.pools.gpu_groups import divide, parts


def gpu_groups(site: Site, here: LocalGpus) -> dict[str, LocalGpus]:
    """The GPUs of each service, as it may cut them.

    What services name under ``gpus`` comes first; the others get equal parts of what is left, the first ones one more.
    With ``plan.colocate`` what is left over is shared instead, and so is what several services name.

    Args:
        site: The site; its ``fleet.devices`` are what was opened, in that order.
        here: All of them, opened.

    Returns:
        By service, in the order of the site file.

    Raises:
        ConfigError: Another engine than the embedded one is to keep several services apart.
        InfeasibleError: A service is left without a GPU, or a shared one has no slice for each.
    """
    if len(site.services) > 1 and not isinstance(site.serving.engine, EmbeddedEngine):
        raise ConfigError(
            f"GPU groups for {len(site.services)} services need the embedded engine",
            pointer="serving.engine",
            got=site.serving.engine.kind,
            expected="embedded",
            hint="give each service a site file of its own",
        )
    listed, names = [device.gpu for device in site.fleet.devices], here.names
    claims = {one.name: [listed.index(gpu) for gpu in one.gpus or ()] for one in site.services}
    divided = divide(claims, len(listed), colocate=site.plan.colocate)
    groups = {service: [names[index] for index in mine] for service, mine in divided.items()}
    return {service: here.group(mine) for service, mine in parts(here.partitions, groups).items()}
