//! The run: worlds side by side, each playing a piece of the plan, until every strike was played; then the tables. Fails when anything
//! that may not happen did, or a cell was not hit as often as it must be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::fixture::Fixture;
use crate::plan::{Fault, Phase, Strike, cells, plan};
use crate::play::{Record, play_bounded};
use crate::report::{Played, print};
use crate::{clock, net};

/// Faults of one world. A member that failed often waits longer each time, and should: a new world forgets that.
const OF_A_WORLD: usize = 4;
/// Times that a strike is tried whose phase was over before the fault had happened.
const TRIES: usize = 8;

/// What the environment asks for.
struct Asked {
    seed: u64,
    faults: usize,
    rounds: usize,
    worlds: usize,
    /// Only strikes whose names hold this, `fault/phase`, and `/lie` of a lying member.
    only: Option<String>,
}

fn asked() -> Asked {
    let number = |name: &str, otherwise: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text:?}")),
        Err(_) => otherwise,
    };
    let seed = number("WEIGHTSYNC_CHAOS_SEED", rand::random_range(0..1_000_000));
    let small = |name: &str, otherwise: u64| usize::try_from(number(name, otherwise)).unwrap();
    Asked {
        seed,
        faults: small("WEIGHTSYNC_CHAOS_FAULTS", 100),
        rounds: small("WEIGHTSYNC_CHAOS_ROUNDS", 1),
        worlds: small("WEIGHTSYNC_CHAOS_WORLDS", 3),
        only: std::env::var("WEIGHTSYNC_CHAOS_ONLY").ok(),
    }
}

pub fn run() {
    let Asked { seed, faults, rounds, worlds, only } = asked();
    println!(
        "chaos: seed {seed}; WEIGHTSYNC_CHAOS_SEED={seed} WEIGHTSYNC_CHAOS_FAULTS={faults} WEIGHTSYNC_CHAOS_ROUNDS={rounds} replays it"
    );
    net::set_up();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut strikes = plan(seed, faults, rounds);
    if let Some(only) = &only {
        strikes.retain(|strike| strike.label().contains(only));
    }
    let pieces: Arc<Vec<Vec<Strike>>> = Arc::new(strikes.chunks(OF_A_WORLD).map(<[Strike]>::to_vec).collect());
    let shim = clock::build();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let played = runtime.block_on(async {
        let (next, names) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let played = Arc::<Mutex<Vec<Played>>>::default();
        let mut players = JoinSet::new();
        for _ in 0..worlds {
            let (pieces, next, names, played, shim) = (pieces.clone(), next.clone(), names.clone(), played.clone(), shim.clone());
            players.spawn(async move {
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    play_piece(piece, &names, &shim, &played).await;
                }
            });
        }
        while let Some(ended) = players.join_next().await {
            ended.unwrap();
        }
        std::mem::take(&mut *played.lock().await)
    });
    let _ = std::fs::remove_file(shim);
    let failures = print(seed, &played);
    let hits = |cell: &(Fault, Phase)| played.iter().filter(|one| (one.strike.fault, one.strike.phase) == *cell && one.hits() > 0).count();
    let missed: Vec<_> = cells().into_iter().filter(|cell| only.is_none() && hits(cell) < rounds).collect();
    assert!(failures == 0, "{failures} of {} faults did not end well", played.len());
    assert!(missed.is_empty(), "not hit {rounds} times: {missed:?}");
}

/// Plays some strikes in one world; one that went wrong costs the world, and the next strike has another.
async fn play_piece(piece: &[Strike], names: &AtomicUsize, shim: &std::path::Path, played: &Mutex<Vec<Played>>) {
    let (mut world, mut faults): (Option<Fixture>, usize) = (None, 0);
    // Of the other pieces, every second one: faults must end in the same way there.
    let every_second = piece.first().is_some_and(|strike| strike.number / OF_A_WORLD % 2 == 1);
    let registered = every_second || piece.iter().any(Strike::needs_registered);
    for strike in piece {
        let mut records: Vec<Record> = Vec::new();
        let mut failure = None;
        while failure.is_none() && records.len() < TRIES && !records.last().is_some_and(|record| record.hit) {
            if (faults >= OF_A_WORLD || strike.needs_new_world())
                && let Some(spent) = world.take()
            {
                spent.stop().await;
            }
            let mut fixture = match world.take() {
                Some(fixture) => fixture,
                None => match Fixture::start(names.fetch_add(1, Ordering::Relaxed), shim, registered).await {
                    Ok(fixture) => {
                        faults = 0;
                        fixture
                    }
                    Err(error) => {
                        failure = Some(format!("a world did not start: {error}"));
                        break;
                    }
                },
            };
            // Anyone who lies is killed twice: for the liar to come, and for it to go.
            faults += if strike.fault == Fault::LyingMember { 2 } else { 1 };
            match play_bounded(&mut fixture, strike).await {
                Ok(record) => {
                    records.push(record);
                    world = Some(fixture);
                }
                Err(error) => {
                    println!("FAILED {strike:?}: {error}\n{}", fixture.evidence());
                    failure = Some(error);
                    fixture.stop().await;
                }
            }
        }
        let one = Played { strike: strike.clone(), records, failure };
        println!("{}", one.line());
        played.lock().await.push(one);
    }
    if let Some(fixture) = world {
        fixture.stop().await;
    }
}
