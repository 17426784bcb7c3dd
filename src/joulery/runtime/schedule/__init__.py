"""The live scheduler of training jobs: reads a cluster, steps the policy and carries out its decisions."""
