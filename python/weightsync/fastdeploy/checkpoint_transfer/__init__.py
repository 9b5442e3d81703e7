"""The part of FastDeploy's transfer library that its workers use, with steps that a WeightSync agent lays into a folder."""
