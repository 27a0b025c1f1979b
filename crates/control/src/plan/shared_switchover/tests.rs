use tempfile::TempDir;
use towline_channel::UnixChannel;

use super::super::recorder::tests::recorder;
use super::super::request::{AfterCopy, CopyRequest, Task, TransferOptions};
use super::*;

fn switchover(destination: DestinationKind) -> (Arc<SharedSwitchover>, UnixChannel) {
    let transfer = TransferOptions::default();
    let options = CopyRequest::new(Task::Copy { transfer, after: AfterCopy::default(), base: None });
    let switchover = SharedSwitchover::new(SourceKind::Qemu, destination, &options);
    let (here, there) = UnixChannel::pair().unwrap();
    switchover.connected(Arc::new(here));
    (switchover, there)
}

#[test]
fn what_is_done_with_both_ends_is_what_the_command_asks_for() {
    let transfer = TransferOptions::default();
    let copy = |after| Task::Copy { transfer, after, base: None };
    let paused = |run| copy(AfterCopy::SourcePaused { run });
    let moved = |run| Task::Move { transfer, run, detach_vsock: false, devices: Vec::new() };
    for (task, run, after) in [
        (paused(None), RunRequest::AsItWas, SourceAction::KeepPaused),
        (paused(Some(true)), RunRequest::Run, SourceAction::KeepPaused),
        (paused(Some(false)), RunRequest::Pause, SourceAction::KeepPaused),
        (copy(AfterCopy::SourceResumed), RunRequest::Pause, SourceAction::Resume),
        (moved(None), RunRequest::AsItWas, SourceAction::Quit),
        (moved(Some(false)), RunRequest::Pause, SourceAction::Quit),
        (Task::Snapshot { base: None }, RunRequest::AsItWas, SourceAction::KeepPaused),
    ] {
        let options = CopyRequest::new(task);
        let switchover = SharedSwitchover::new(SourceKind::Qemu, DestinationKind::Qemu, &options);
        let request = switchover.state().request();
        assert_eq!((request.run, request.after), (run, after), "{:?}", options.task);
    }
}

/// Has a switchover that has just been made record its decisions below this directory.
pub(in super::super) fn recording(
    switchover: Arc<SharedSwitchover>,
    place: &TempDir,
) -> Arc<SharedSwitchover> {
    let mut switchover = Arc::into_inner(switchover).unwrap();
    switchover.recorder = recorder(place);
    Arc::new(switchover)
}

/// The source has its guest back, so it must not run elsewhere.
#[test]
fn a_source_is_not_acknowledged_if_that_cannot_be_recorded() {
    for is_lost in [false, true] {
        let (place, options) = (TempDir::new().unwrap(), CopyRequest::default());
        let switchover = SharedSwitchover::new(SourceKind::Stream, DestinationKind::Qemu, &options);
        let switchover = recording(switchover, &place);
        switchover.source_reports([3; 16]);
        assert_eq!(switchover.commit(None), Commit::Reversible);
        if is_lost {
            std::fs::remove_dir_all(place.path().join("towline")).unwrap();
        }
        assert_eq!(switchover.acknowledge(None, LinkState::Open), !is_lost);
        assert_eq!(switchover.not_recorded().is_some(), is_lost);
    }
}

/// The source has its guest back, so a destination that runs the guest on its own must not receive the rest.
#[test]
fn a_source_that_has_disconnected_ends_the_stream_before_the_last_bytes() {
    let (switchover, source) = switchover(DestinationKind::Stream);
    assert!(switchover.confirms_loading());
    drop(source);
    assert_eq!(switchover.commit(Some("running")), Commit::Refused);
    let (switchover, _source) = super::tests::switchover(DestinationKind::Stream);
    assert_eq!(switchover.commit(Some("running")), Commit::Final);
    assert!(!switchover.cancel(), "it is too late");
    assert!(switchover.must_acknowledge_after(&EngineError::Cancelled));
}

#[test]
fn a_destination_that_waits_can_be_given_up_until_its_source_is_acknowledged() {
    let (switchover, _source) = switchover(DestinationKind::Qemu);
    assert!(!switchover.confirms_loading());
    assert_eq!(switchover.commit(Some("suspended")), Commit::Reversible);
    assert_eq!(switchover.state().guest(), GuestRunState::Suspended);
    assert!(switchover.cancel());
    assert!(!switchover.acknowledge(Some("running"), LinkState::Open), "it is cancelled");
    let (switchover, _source) = super::tests::switchover(DestinationKind::Qemu);
    assert_eq!(switchover.commit(Some("running")), Commit::Reversible);
    assert!(switchover.acknowledge(Some("running"), LinkState::Open));
    assert!(!switchover.cancel(), "it is too late");
}

/// The source's towline reports the outcome: until then a lost connection means a source that runs its guest.
#[test]
fn a_source_whose_connection_is_gone_is_not_acknowledged() {
    for link in [LinkState::Closed, LinkState::Reset] {
        let options = CopyRequest::default();
        let switchover = SharedSwitchover::new(SourceKind::Stream, DestinationKind::Qemu, &options);
        switchover.source_reports([3; 16]);
        assert_eq!(switchover.move_id(), [3; 16]);
        assert_eq!(switchover.commit(None), Commit::Reversible);
        assert!(!switchover.acknowledge(None, link));
    }
}

#[test]
fn the_first_failure_decides() {
    let (switchover, _source) = switchover(DestinationKind::Qemu);
    assert_eq!(switchover.failed(&Error::Cancelled), Directive::QuerySource);
    assert_eq!(switchover.failed(&Error::Cancelled), Directive::QuerySource);
    assert!(switchover.state().cancels_next(), "the second report is not another input");
}
