//! The source agent's side of the trainer's socket.
