//! What every long-running program of ours needs: certificates, HTTPS with identity, health, metrics, logs, leases, deadlines.
