"""How many replicas of each stage a load needs: a simulation of the pipeline with measured costs."""
