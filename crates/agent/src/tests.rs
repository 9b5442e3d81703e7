//! Groups of agents in one process, over real TLS and TCP on the loopback, with an engine that reads what it is given; and tables and
//! properties of the state machines.

mod announcing;
mod bed;
mod canary;
mod corrupting;
mod doors;
mod engine;
mod epochs;
mod external;
mod feeding;
mod going_back;
mod installs;
mod keeping;
mod lasting;
mod lying;
mod machine;
mod memory;
mod publishes;
mod pure;
mod reach;
mod surroundings;
mod trainer;
mod unproven;
mod waves;
mod workers;
