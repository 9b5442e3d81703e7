use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn silence_ends_a_wait() {
    let deadline = ProgressDeadline::new(SECOND, 60 * SECOND);
    let begun = Instant::now();
    assert_eq!(deadline.passed().await, Passed::Silent(SECOND));
    assert_eq!(begun.elapsed().as_secs(), 1);
}

#[tokio::test(start_paused = true)]
async fn progress_extends_a_wait_up_to_its_last_end() {
    let deadline = ProgressDeadline::new(SECOND, 10 * SECOND);
    let begun = Instant::now();
    let moving = async {
        loop {
            tokio::time::sleep(SECOND / 2).await;
            deadline.moved();
        }
    };
    let passed = tokio::select! {
        biased;
        () = moving => unreachable!(),
        passed = deadline.passed() => passed,
    };
    assert_eq!(passed, Passed::Total(10 * SECOND));
    assert_eq!(begun.elapsed().as_secs(), 10);
}
