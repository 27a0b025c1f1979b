//! The other end of a copy by postcopy.

use towline_channel::Address;
use towline_protocol::RamBlock;
use towline_protocol::ram::PAGE_SIZE;

use super::super::context::Context;
use super::super::destination::RecoveryState;
use super::super::error::{Error, Failure, needs_attention};
use super::super::error_origin;
use super::super::outcomes::GuestLocation;
use super::super::report::DestinationState;
use super::super::request::PostcopyOptions;

/// A QEMU that takes the guest. What the defaults say holds for one that nobody can ask.
pub(super) trait PostcopyDestination {
    /// Whether we can ask it, and tell it to listen again.
    fn is_driven(&self) -> bool {
        false
    }

    /// Whether the guest ran when we came.
    fn was_running(&self) -> bool {
        true
    }

    /// The size of the pages behind each block; of one that cannot be asked 4 KiB.
    fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        vec![PAGE_SIZE; blocks.len()]
    }

    /// Where it listens, told to if it can be.
    fn listen(&mut self, options: PostcopyOptions, runs: bool) -> Result<Address, Error>;

    /// Whether the guest is seen to run.
    fn runs_now(&mut self) -> bool {
        false
    }

    /// What became of it when its connection was lost.
    fn recovery_state(&mut self) -> Result<RecoveryState, Error>;

    /// It does not listen again by itself.
    fn wait_for_help(&mut self, why: &towline_migration::Error, context: &Context<'_>);

    /// Before the guest runs: puts things back. Returns the reason, the destination's own if that is better, and notes.
    fn roll_back(&mut self, error: Error) -> (Error, Vec<String>) {
        (error, Vec::new())
    }

    /// The guest did not come to run here. Returns notes.
    fn give_back(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// The destination says that it could not take the guest.
    fn given_up(&mut self, why: towline_migration::Error, text: &str, had_loaded: bool) -> Failure {
        let _ = (text, had_loaded);
        self.left(why.into())
    }

    /// Its monitor is lost.
    fn ended(&mut self, error: Error, had_loaded: bool) -> Failure {
        let _ = had_loaded;
        self.left(error)
    }

    /// Nobody brings it its memory any more.
    fn left(&mut self, error: Error) -> Failure {
        stopped(error)
    }

    /// What the guest does there when it has all of its memory.
    fn state(&self, runs: bool) -> DestinationState {
        let _ = runs;
        DestinationState::Loaded
    }

    /// All memory is there. Returns notes.
    fn finish(&mut self, runs: bool) -> Result<Vec<String>, Failure> {
        let _ = runs;
        Ok(Vec::new())
    }
}

/// The guest runs without a part of its memory: because its connection was lost, or because its image cannot be read.
pub(super) fn stopped(error: Error) -> Failure {
    let location = match &error {
        Error::Migration(error) if error_origin::is_guest_error(error) => GuestLocation::PostcopyUnreadable,
        _ => GuestLocation::PostcopyPaused,
    };
    needs_attention(error, location)
}

#[cfg(test)]
mod tests {
    use super::super::super::outcomes::GuestState;
    use super::*;

    #[test]
    fn a_lost_connection_and_a_damaged_image_are_told_apart() {
        let lost =
            || towline_migration::Error::Ended { peer: "unix:/run/vm/b.sock".into(), awaiting: "a request" };
        assert_eq!(stopped(lost().into()).guest, GuestState::needs_attention(GuestLocation::PostcopyPaused));
        let not_recovered =
            Error::NotRecovered { source: lost(), waited: std::time::Duration::from_secs(60) };
        assert_eq!(stopped(not_recovered).guest, GuestState::needs_attention(GuestLocation::PostcopyPaused));
        let damaged =
            towline_migration::Error::guest(std::io::Error::other("block pc.ram, chunk 7: damaged"));
        assert_eq!(
            stopped(damaged.into()).guest,
            GuestState::needs_attention(GuestLocation::PostcopyUnreadable)
        );
    }
}
