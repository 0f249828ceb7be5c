//! Values that are made once for each device, each under a lock of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A value's place, and the lock under which it is made.
type Cell<T> = Arc<Mutex<Option<Arc<T>>>>;

/// One value for each device that asked for it.
///
/// Making one may take long: an allocation and a copy wait for the device. Only threads that want
/// the same device's value wait for that.
#[derive(Debug)]
pub struct PerDevice<T>(Mutex<HashMap<u32, Cell<T>>>);

impl<T> Default for PerDevice<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> PerDevice<T> {
    /// The value of a device, made by the first thread that asks. What fails is tried again by the
    /// next.
    ///
    /// # Errors
    /// What `make` says.
    pub fn get_or_make<E>(
        &self,
        device: u32,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let cell = Arc::clone(locked(&self.0).entry(device).or_default());
        let mut value = locked(&cell);
        if let Some(made) = &*value {
            return Ok(Arc::clone(made));
        }
        let made = Arc::new(make()?);
        *value = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// What a thread that panicked left is whole: a value is put in its place after it is made.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_device_does_not_wait_for_another() {
        let values = PerDevice::default();
        let (finished, wait) = channel();
        thread::scope(|scope| {
            let (values, (started, start)) = (&values, channel());
            let slow = scope.spawn(move || {
                values.get_or_make(0, || {
                    started.send(()).unwrap();
                    wait.recv_timeout(LONG).map(|()| 0)
                })
            });
            start.recv_timeout(LONG).unwrap();
            assert_eq!(values.get_or_make(1, || Ok::<_, ()>(1)).as_deref(), Ok(&1));
            finished.send(()).unwrap();
            assert_eq!(slow.join().unwrap().as_deref(), Ok(&0), "it waited for device 0");
        });
    }

    #[test]
    fn a_value_is_made_once_and_a_failure_is_tried_again() {
        let values = PerDevice::default();
        assert_eq!(values.get_or_make(3, || Err("no memory")), Err("no memory"));
        let first = values.get_or_make(3, || Ok::<_, ()>(7)).unwrap();
        let second = values.get_or_make(3, || Err("made twice")).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
    }
}
