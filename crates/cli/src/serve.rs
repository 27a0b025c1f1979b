//! Serves the devices of a process, each on a thread, until a signal, the end of all, or a deadline.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use towline_channel::{Cancel, is_out_of_resources};
use towline_vhost_user::{Device, FrontendSource, InFlightRecord, ServeError, Service};

/// Interval of attempts while the process lacks descriptors or memory.
const RETRY_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Time limit of the devices once the process is to end. Each stops its rings and its threads within less,
/// unless one of its threads waits in the kernel.
const END_WITHIN: Duration = Duration::from_secs(10);

/// A device, and the origin of its frontends.
pub(crate) struct DeviceServer {
    /// Name in messages.
    pub(crate) name: String,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) frontends: FrontendSource,
    pub(crate) record: InFlightRecord,
}

/// Serves each device on a thread, until cancelled or until all have failed. Returns the first failure.
pub(crate) fn serve_all(devices: Vec<DeviceServer>, cancel: &Cancel) -> Result<()> {
    let devices = devices.into_iter().map(|served| {
        let (name, cancel) = (served.name.clone(), cancel.clone());
        (name, move || serve(served, &cancel))
    });
    run_all(devices.collect(), cancel)
}

/// Runs the threads of the devices. One that fails does not end the others, and one that does not end with
/// the process is leaked.
fn run_all(
    devices: Vec<(String, impl FnOnce() -> Result<()> + Send + 'static)>,
    cancel: &Cancel,
) -> Result<()> {
    let all_ended = Cancel::new().context("cancellation token")?;
    let running = Arc::new(AtomicUsize::new(devices.len()));
    let (ended, outcomes) = channel();
    for (name, serve) in devices {
        let (token, last, running, ended) =
            (cancel.clone(), all_ended.clone(), Arc::clone(&running), ended.clone());
        let thread = thread::Builder::new().name(name.replace(' ', "-"));
        let serve = move || {
            let done =
                catch_unwind(AssertUnwindSafe(serve)).unwrap_or_else(|_| Err(anyhow!("the thread panicked")));
            let done = if token.is_cancelled() { Ok(()) } else { done.context(name) };
            let is_last = running.fetch_sub(1, Ordering::AcqRel) == 1;
            if let Err(error) = &done
                && !is_last
            {
                tracing::error!(error = %format!("{error:#}"), "a device failed; the others are still served");
            }
            let _ = ended.send(done);
            if is_last {
                last.cancel();
            }
        };
        thread.spawn(serve).inspect_err(|_| cancel.cancel())?;
    }
    drop(ended);
    wait(&[cancel, &all_ended], None);
    let deadline = Instant::now() + END_WITHIN;
    let mut outcome = Ok(());
    loop {
        match outcomes.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(done) => outcome = outcome.and(done),
            Err(RecvTimeoutError::Disconnected) => return outcome,
            Err(RecvTimeoutError::Timeout) => {
                let devices = running.load(Ordering::Acquire);
                tracing::error!(
                    devices,
                    "devices do not end, as a thread waits in the kernel; ending without them"
                );
                return outcome;
            }
        }
    }
}

/// Serves the frontends of a device until cancelled. A lack of descriptors or memory is temporary.
fn serve(served: DeviceServer, cancel: &Cancel) -> Result<()> {
    let DeviceServer { name, device, frontends, record } = served;
    let mut service = Service::new(frontends);
    let mut is_logged = false;
    loop {
        match service.serve(&device, &record, cancel) {
            _ if cancel.is_cancelled() => return Ok(()),
            Err(error) if is_shortage(&error) => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(%error, name, "frontends cannot connect until descriptors or memory are available");
                }
                wait(&[cancel], Some(&RETRY_INTERVAL));
            }
            result => return Ok(result?),
        }
    }
}

/// Waits until one of the tokens is cancelled, or for the time.
pub(crate) fn wait(tokens: &[&Cancel], time: Option<&Timespec>) {
    let mut fds: Vec<_> = tokens.iter().map(|token| PollFd::new(*token, PollFlags::IN)).collect();
    loop {
        match poll(&mut fds, time) {
            Err(Errno::INTR) => {}
            Err(errno) => return tracing::debug!(%errno, "poll"),
            Ok(_) => return,
        }
    }
}

/// Returns true if the process, or the host, lacks descriptors or memory.
fn is_shortage(error: &ServeError) -> bool {
    match error {
        ServeError::Channel(error) => is_out_of_resources(error),
        ServeError::Descriptor(error) => {
            matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type ServeDevice = Box<dyn FnOnce() -> Result<()> + Send>;

    #[test]
    fn a_failure_or_panic_of_one_device_does_not_end_the_others() {
        let cancel = Cancel::new().unwrap();
        let (ended, others) = channel();
        let fails = ended.clone();
        let survives = move || {
            for _ in 0..2 {
                others.recv_timeout(Duration::from_secs(60))?;
            }
            Ok(())
        };
        let devices: Vec<(String, ServeDevice)> = vec![
            (
                "guest 3".into(),
                Box::new(move || fails.send(()).map_err(Into::into).and(Err(anyhow!("no descriptor")))),
            ),
            (
                "guest 4".into(),
                Box::new(move || ended.send(()).map(|()| panic!("a bug")).map_err(Into::into)),
            ),
            ("guest 5".into(), Box::new(survives)),
        ];
        let error = format!("{:#}", run_all(devices, &cancel).unwrap_err());
        assert!(["guest 3: no descriptor", "guest 4: the thread panicked"].contains(&&*error), "{error}");
        assert!(!cancel.is_cancelled());
    }

    #[test]
    fn a_device_whose_thread_is_blocked_does_not_keep_the_process() {
        let cancel = Cancel::new().unwrap();
        let (blocked, never) = channel::<()>();
        let blocks: ServeDevice = Box::new(move || Ok(never.recv()?));
        let token = cancel.clone();
        let waits: ServeDevice = Box::new(move || {
            wait(&[&token], None);
            Ok(())
        });
        let began = Instant::now();
        cancel.cancel();
        run_all(vec![("guest 3".into(), blocks), ("guest 4".into(), waits)], &cancel).unwrap();
        assert!(began.elapsed() >= END_WITHIN);
        drop(blocked);
    }
}
