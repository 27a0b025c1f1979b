//! Destination of a postcopy.

use towline_channel::Address;
use towline_protocol::RamBlock;
use towline_protocol::ram::PAGE_SIZE;

use super::super::context::Context;
use super::super::destination::RecoveryState;
use super::super::error::{Error, Failure, needs_attention};
use super::super::error_origin;
use super::super::report::DestinationState;
use super::super::request::PostcopyOptions;
use crate::switchover::{FinalRunState, GuestState};

/// A QEMU that takes the guest. The defaults are those of one whose monitor is not connected.
pub(super) trait PostcopyDestination {
    /// Returns true if its monitor is connected.
    fn is_driven(&self) -> bool {
        false
    }

    /// Returns true if the guest ran when it was connected to.
    fn was_running(&self) -> bool {
        true
    }

    /// Sizes of the pages behind each block; 4 KiB if they cannot be queried.
    fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        vec![PAGE_SIZE; blocks.len()]
    }

    /// Has it listen, if it is driven; returns its address.
    fn listen(&mut self, options: PostcopyOptions, run_state: FinalRunState) -> Result<Address, Error>;

    /// Returns true if the guest is seen to run.
    fn runs_now(&mut self) -> bool {
        false
    }

    /// State after its connection was lost.
    fn recovery_state(&mut self) -> Result<RecoveryState, Error>;

    /// Called when it does not listen again by itself.
    fn reconnect_manually(&mut self, reason: &towline_migration::Error, context: &Context<'_>);

    /// Rolls back before the guest runs. Returns the error, or the destination's own reason if that is better,
    /// and notices.
    fn roll_back(&mut self, error: Error) -> (Error, Vec<String>) {
        (error, Vec::new())
    }

    /// Restores settings of a destination that did not start the guest. Returns notices.
    fn restore_unstarted(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The failure of a destination that reported that it could not take the guest.
    fn load_failure(&mut self, reason: towline_migration::Error, text: &str, had_loaded: bool) -> Failure {
        let _ = (text, had_loaded);
        self.interrupted(reason.into())
    }

    /// The failure of a destination whose monitor is lost.
    fn monitor_failure(&mut self, error: Error, had_loaded: bool) -> Failure {
        let _ = had_loaded;
        self.interrupted(error)
    }

    /// The failure of a destination that is sent no more memory.
    fn interrupted(&mut self, error: Error) -> Failure {
        stopped(error)
    }

    /// State of the guest when it has all of its memory.
    fn state(&self, run_state: FinalRunState) -> DestinationState {
        let _ = run_state;
        DestinationState::Loaded
    }

    /// Restores settings when all memory has arrived. Returns notices.
    fn finish(&mut self, run_state: FinalRunState) -> Result<Vec<String>, Failure> {
        let _ = run_state;
        Ok(Vec::new())
    }
}

/// The guest runs without a part of its memory: its connection was lost, or its image cannot be read.
pub(super) fn stopped(error: Error) -> Failure {
    let state = match &error {
        Error::Migration(error) if error_origin::is_guest_error(error) => GuestState::UNREADABLE,
        _ => GuestState::LACKS_MEMORY,
    };
    needs_attention(error, state)
}

#[cfg(test)]
mod tests {
    use super::super::super::outcomes::GuestAfterFailure;
    use super::*;

    #[test]
    fn lost_connection_and_damaged_image_have_different_outcomes() {
        let lost =
            || towline_migration::Error::Ended { peer: "unix:/run/vm/b.sock".into(), awaiting: "a request" };
        assert_eq!(stopped(lost().into()).guest, GuestAfterFailure::unresolved(GuestState::LACKS_MEMORY));
        let not_recovered =
            Error::NotRecovered { source: lost(), waited: std::time::Duration::from_secs(60) };
        assert_eq!(stopped(not_recovered).guest, GuestAfterFailure::unresolved(GuestState::LACKS_MEMORY));
        let damaged =
            towline_migration::Error::guest(std::io::Error::other("block pc.ram, chunk 7: damaged"));
        assert_eq!(stopped(damaged.into()).guest, GuestAfterFailure::unresolved(GuestState::UNREADABLE));
    }
}
