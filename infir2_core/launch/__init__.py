"""From a resolved plan to running processes: what a run will need, its folder, its ranks on this machine."""
