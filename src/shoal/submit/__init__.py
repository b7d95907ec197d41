"""Job files of a run for Slurm, Kubernetes and Ray, and the schedulers that take them."""
