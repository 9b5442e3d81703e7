"""WeightSync in trainers that exist: one module each, imported only when it is used. See docs/integrations."""
