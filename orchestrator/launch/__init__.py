"""From a planned run to its processes: folder, frozen code, leases, ranks, and following them."""
