//! Work that waits for a device, on a thread of its own.

use std::thread;

/// Runs `work` on another thread and returns at once; runs it here where none can be had.
pub(crate) fn run(work: impl FnOnce() + Clone + Send + 'static) {
    let spawned = thread::Builder::new().name("kvweave-wait".into()).spawn(work.clone());
    if spawned.is_err() {
        work();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_caller_does_not_wait() {
        let (go, gone) = channel::<()>();
        let (done, end) = channel();
        let gone = Arc::new(Mutex::new(gone));
        run(move || {
            let told = gone.lock().unwrap().recv_timeout(Duration::from_secs(20));
            done.send(told.is_ok()).unwrap();
        });
        go.send(()).unwrap();
        assert_eq!(end.recv_timeout(Duration::from_secs(30)), Ok(true));
    }
}
