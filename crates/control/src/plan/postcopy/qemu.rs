//! A QEMU whose monitor is connected, as destination of a postcopy.

use std::path::Path;

use towline_channel::Address;
use towline_migration::Compression;
use towline_protocol::RamBlock;

use super::super::context::Context;
use super::super::destination::{HeldGuest, QmpDestination, RecoveryState};
use super::super::error::{Error, Failure, needs_attention};
use super::super::error_origin;
use super::super::outcomes::GuestAfterFailure;
use super::super::preflight::GuestFacts;
use super::super::report::DestinationState;
use super::super::request::{PostcopyOptions, RequestedPages};
use super::destination::{PostcopyDestination, stopped};
use super::stored::RestoreSource;
use crate::switchover::{FinalRunState, GuestState};

/// See the module's text.
pub(super) struct DrivenDestination(QmpDestination);

impl DrivenDestination {
    /// Connects and checks it; nothing is changed.
    pub(super) fn prepare(
        path: &Path,
        stored: &RestoreSource<'_>,
        options: PostcopyOptions,
        context: &Context<'_>,
    ) -> Result<Self, Error> {
        let mut qemu = if options.recover {
            QmpDestination::prepare_recovery(path, context)?
        } else {
            QmpDestination::prepare_postcopy(path, context)?
        };
        context.report_repair(qemu.qemu());
        let machine_type = &stored.guest.configuration().machine_type;
        qemu.check(&GuestFacts::of_blocks(machine_type, stored.guest.blocks()), context)?;
        let expected = qemu.requested_pages();
        if options.recover && expected != options.requested_pages {
            let (has, option) = match expected {
                RequestedPages::PreemptChannel => ("a preempt channel", "pass --postcopy-preempt"),
                RequestedPages::MainChannel => ("no preempt channel", "leave --postcopy-preempt out"),
            };
            return Err(Error::Usage(format!("the guest was started with {has}: {option}")));
        }
        Ok(Self(qemu))
    }
}

impl PostcopyDestination for DrivenDestination {
    fn is_driven(&self) -> bool {
        true
    }

    fn was_running(&self) -> bool {
        self.0.was_running()
    }

    fn page_bytes(&self, blocks: &[RamBlock]) -> Vec<u64> {
        self.0.page_bytes(blocks)
    }

    fn listen(&mut self, options: PostcopyOptions, run_state: FinalRunState) -> Result<Address, Error> {
        self.0.start_postcopy(options.requested_pages, run_state, 0, Compression::None)
    }

    fn runs_now(&mut self) -> bool {
        self.0.runs_now().is_ok_and(|runs| runs == Some(true))
    }

    fn recovery_state(&mut self) -> Result<RecoveryState, Error> {
        self.0.recovery_state()
    }

    fn reconnect_manually(&mut self, _: &towline_migration::Error, _: &Context<'_>) {
        self.0.pause_migration();
    }

    fn roll_back(&mut self, error: Error) -> (Error, Vec<String>) {
        (self.0.explain(error), self.0.roll_back(HeldGuest::Incomplete))
    }

    fn restore_unstarted(&mut self) -> Vec<String> {
        self.0.roll_back(HeldGuest::Incomplete)
    }

    fn load_failure(&mut self, _: towline_migration::Error, text: &str, had_loaded: bool) -> Failure {
        let error = self.0.failed(text);
        self.0.keep_settings();
        if had_loaded {
            needs_attention(error, GuestState::RAN_AND_ENDED)
        } else {
            Failure {
                error: Box::new(error),
                guest: GuestAfterFailure::SAFE,
                notes: self.0.roll_back(HeldGuest::Incomplete),
            }
        }
    }

    fn monitor_failure(&mut self, error: Error, had_loaded: bool) -> Failure {
        self.0.keep_settings();
        match (error_origin::is_monitor_lost(&error), had_loaded) {
            (true, false) => Failure::untouched(error),
            (true, true) => needs_attention(error, GuestState::RAN_AND_ENDED),
            (false, _) => needs_attention(error, GuestState::LACKS_MEMORY),
        }
    }

    fn interrupted(&mut self, error: Error) -> Failure {
        let is_blocked = self.0.is_blocked();
        self.0.keep_settings();
        if is_blocked { needs_attention(error, GuestState::BLOCKED) } else { stopped(error) }
    }

    fn state(&self, run_state: FinalRunState) -> DestinationState {
        run_state.into()
    }

    fn finish(&mut self, run_state: FinalRunState) -> Result<Vec<String>, Failure> {
        let qemu = &mut self.0;
        let finished = qemu.wait_completed().and_then(|()| match run_state {
            FinalRunState::Running => qemu.check_running(),
            FinalRunState::Paused => Ok(()),
        });
        finished.and_then(|()| qemu.restore_settings()).map_err(|error| {
            if error_origin::is_monitor_lost(&error) {
                needs_attention(error, GuestState::RAN_AND_ENDED)
            } else {
                needs_attention(error, GuestState::ARRIVED)
            }
        })
    }
}
