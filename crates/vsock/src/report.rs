//! Exchange of reports: the worker publishes one on request, and when it ends.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock::lock;
use crate::statistics::VsockReport;

/// Time limit of a worker for a report that is only read; after that the last published one is returned.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The last report of a device, shared by its workers and the threads that request it.
#[derive(Debug, Default)]
pub(crate) struct SharedReport {
    requested: AtomicBool,
    last: Mutex<Published>,
    published: Condvar,
    /// Running workers, which can publish a report.
    workers: AtomicUsize,
}

#[derive(Debug, Default)]
struct Published {
    report: VsockReport,
    /// Number of reports so far.
    count: u64,
}

impl SharedReport {
    /// Returns true if a report is requested; only the first caller after a request sees that.
    pub(crate) fn accept_request(&self) -> bool {
        self.requested.load(Ordering::Relaxed) && self.requested.swap(false, Ordering::Acquire)
    }

    /// Registers a worker that can publish.
    pub(crate) fn add_worker(&self) {
        self.workers.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a worker.
    pub(crate) fn remove_worker(&self) {
        self.workers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns true if a worker is running.
    pub(crate) fn has_worker(&self) -> bool {
        self.workers.load(Ordering::Relaxed) > 0
    }

    /// Replaces the last report.
    pub(crate) fn publish(&self, report: VsockReport) {
        let mut last = lock(&self.last);
        *last = Published { report, count: last.count + 1 };
        self.published.notify_all();
    }

    /// Requests a report, waits for it, and returns the last one. `wake` wakes the worker.
    pub(crate) fn request(&self, wake: impl FnOnce()) -> VsockReport {
        self.request_current(REPORT_TIMEOUT, wake).unwrap_or_else(|| lock(&self.last).report.clone())
    }

    /// As [`Self::request`]; `None` if the worker does not publish one in this time.
    pub(crate) fn request_current(&self, within: Duration, wake: impl FnOnce()) -> Option<VsockReport> {
        let last = lock(&self.last);
        if !self.has_worker() {
            return Some(last.report.clone());
        }
        let before = last.count;
        self.requested.store(true, Ordering::Release);
        wake();
        let waited = self.published.wait_timeout_while(last, within, |last| last.count == before);
        let last = waited.unwrap_or_else(PoisonError::into_inner).0;
        (last.count != before).then(|| last.report.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_does_not_report_has_no_current_report() {
        let shared = SharedReport::default();
        shared.publish(VsockReport::default());
        assert!(
            shared.request_current(REPORT_TIMEOUT, || {}).is_some(),
            "the last one of a worker that has ended"
        );
        shared.add_worker();
        assert!(shared.request_current(REPORT_TIMEOUT, || {}).is_none());
        assert!(shared.accept_request());
        std::thread::scope(|scope| {
            let publishes = || {
                while !shared.accept_request() {
                    std::thread::yield_now();
                }
                shared.publish(VsockReport::default());
            };
            let published = scope.spawn(publishes);
            assert!(shared.request_current(Duration::from_secs(60), || {}).is_some());
            published.join().unwrap();
        });
    }
}
