"""MPI between ranks that mpiexec started: the extra `mpi`."""
