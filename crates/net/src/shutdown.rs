//! Ends a program when it is told to: the first SIGTERM or SIGINT asks all parts to stop, the second ends the process at once.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit status after the second signal.
const ABORTED: i32 = 130;

/// Returns a token that the first SIGTERM or SIGINT cancels. Must be called within a runtime.
pub fn on_signals() -> std::io::Result<CancellationToken> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let cancel = CancellationToken::new();
    let told = cancel.clone();
    tokio::spawn(async move {
        either(&mut terminate, &mut interrupt).await;
        tracing::info!("asked to stop");
        told.cancel();
        either(&mut terminate, &mut interrupt).await;
        tracing::warn!("asked to stop again: ending at once");
        std::process::exit(ABORTED);
    });
    Ok(cancel)
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
