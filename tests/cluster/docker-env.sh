# The network of the test cluster's own docker daemon. Source it.

NAMESPACE=weightsync
HOST_LINK=weightsync0
# Of 198.18.0.0/15, which is set aside for tests: no machine has a route there.
HOST_ADDRESS=198.18.71.1
CLUSTER_ADDRESS=198.18.71.2

# Whether this machine lets its containers have CAP_SYS_RESOURCE (bit 24 of the bounding set).
may_sys_resource() {
  local bounding
  bounding=$(awk '/^CapBnd/ {print $2}' /proc/self/status)
  (((16#$bounding >> 24) & 1))
}
