"""Several gateways with one controller: their processes, and the controller's side of them."""
