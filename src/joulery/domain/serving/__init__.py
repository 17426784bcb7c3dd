"""Services, their SLOs, and the replicas that serve them."""
