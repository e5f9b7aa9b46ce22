"""Plans the replicas of each stage for a load, by simulating the pipeline with measured costs."""
