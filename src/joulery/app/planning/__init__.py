"""From a site file to a plan: :func:`~joulery.app.planning.plans.plan_site` is the use case."""
