"""The live scheduler of training jobs: looks at a cluster, asks the policy, has its decisions carried out."""
