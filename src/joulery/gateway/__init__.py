"""The HTTP data plane: inference protocols, metrics, health, administration."""
