"""Report pages: what a run did, on one page that needs nothing from elsewhere. They read the files of runs and nothing else."""
