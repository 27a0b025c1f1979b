//! Where a stream goes: checked, reached when its source is ready, put in order afterwards.

use std::sync::Arc;

use towline_channel::Address;
#[cfg(feature = "store")]
use towline_image::store::StoreWriter;
use towline_image::{ImageWriter, Origin};
use towline_migration::incoming::Connections;
use towline_migration::synthetic::Checked;
use towline_migration::{Relay, Session, Sink};

use super::copy::Run;
use super::destination::QmpDestination;
use super::fit::{Guest, uuid_bytes};
use super::survey::Survey;
use super::vsock::Vsocks;
use super::zero_copy::lane_options;
use super::{Destination, DestinationState, Error, Phase, blame, memory};

/// Where a stream goes.
pub(super) enum Target {
    Image(Box<ImageWriter>),
    #[cfg(feature = "store")]
    Store(Box<StoreWriter>),
    /// The relay is there once it is connected.
    Qemu {
        destination: Box<QmpDestination>,
        relay: Option<Box<Relay>>,
    },
    Stream {
        address: Address,
        uuid: [u8; 16],
        relay: Option<Box<Relay>>,
    },
    Memory(Box<Checked>),
    Null(Survey),
}

impl Target {
    /// Checks what can be checked. The destination is not told anything.
    pub(super) fn prepare(
        destination: &Destination,
        guest: Option<&Guest>,
        origin: Origin,
        run: &Run<'_>,
    ) -> Result<Self, Error> {
        Ok(match destination {
            Destination::Image(path) => Self::Image(Box::new(run.image_writer(path, origin)?)),
            #[cfg(feature = "store")]
            Destination::Store(location) => {
                Self::Store(Box::new(super::store::writer(location, origin, run)?))
            }
            Destination::Qmp(path) => {
                let mut destination = Box::new(QmpDestination::prepare(path)?);
                if let Some(guest) = guest {
                    destination.check(guest, run.lanes, run.observer)?;
                }
                Self::Qemu { destination, relay: None }
            }
            Destination::Stream(address) => {
                let uuid = guest.and_then(|guest| guest.uuid.as_deref()).map_or([0; 16], uuid_bytes);
                Self::Stream { address: address.clone(), uuid, relay: None }
            }
            Destination::Memory(room) => Self::Memory(Box::new(memory::room(room)?)),
            Destination::Null => Self::Null(Survey::default()),
        })
    }

    /// Refuses a destination that could not take these again.
    pub(super) fn check_vsocks(&mut self, vsocks: &Vsocks) -> Result<(), Error> {
        match self {
            Self::Qemu { destination, .. } => destination.check_vsocks(vsocks),
            _ => Ok(()),
        }
    }

    /// Puts in again what was taken out of the guest at its source.
    pub(super) fn attach(&mut self, vsocks: &Vsocks) -> Result<(), Error> {
        match self {
            Self::Qemu { destination, .. } => destination.attach(vsocks),
            _ => Ok(()),
        }
    }

    /// Reaches the destination for a source that is there, and is refused if that fails.
    pub(super) fn connect_for(
        &mut self,
        source: Connections,
        session: &Arc<Session>,
        run: &Run<'_>,
    ) -> Result<Connections, Error> {
        match self.connect(session, run) {
            Ok(()) => Ok(source),
            Err(error) => {
                source.refuse();
                Err(error)
            }
        }
    }

    /// Has the destination listen, and reaches it. `session` is that of the incoming migration.
    pub(super) fn connect(&mut self, session: &Arc<Session>, run: &Run<'_>) -> Result<(), Error> {
        let relay = |connections| {
            let relay = Relay::with_options(Arc::clone(session), connections, lane_options(run.options))?;
            run.set_sending(relay.statistics());
            Ok::<_, Error>(Some(Box::new(relay)))
        };
        match self {
            Self::Qemu { destination, relay: to } => {
                *to = relay(destination.start(run.lanes, run.options, run.cancel)?)?;
            }
            Self::Stream { address, uuid, relay: to } => {
                *to = relay(run.reach(address, *uuid)?)?;
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn sink(&self) -> &dyn Sink {
        match self {
            Self::Image(writer) => writer.as_ref(),
            #[cfg(feature = "store")]
            Self::Store(writer) => writer.as_ref(),
            Self::Qemu { relay, .. } | Self::Stream { relay, .. } => {
                relay.as_deref().expect("connected before anything is received")
            }
            Self::Memory(memory) => memory.as_ref(),
            Self::Null(survey) => survey,
        }
    }

    pub(super) fn is_survey(&self) -> bool {
        matches!(self, Self::Null(_))
    }

    pub(super) fn surveyed(&self) -> bool {
        matches!(self, Self::Null(survey) if survey.is_complete())
    }

    /// Somebody else decides whether the guest runs there.
    pub(super) fn runs_by_itself(&self) -> bool {
        matches!(self, Self::Stream { .. })
    }

    /// Whether the guest ran at its source, for a target that we run.
    pub(super) fn guest_ran(&self) -> bool {
        match self {
            Self::Qemu { relay, .. } => relay.as_deref().and_then(Relay::guest_ran).unwrap_or(true),
            _ => false,
        }
    }

    /// Whether the error is one of the connection to it.
    pub(super) fn is_to_blame(&self, error: &Error) -> bool {
        matches!(self, Self::Qemu { destination, .. } if destination.is_to_blame(error))
    }

    /// Whether it has the whole guest, or may have: was sent it. `is_finished`: the migration went through here.
    pub(super) fn has_it(&self, is_finished: bool) -> bool {
        match self {
            Self::Image(_) | Self::Stream { .. } if is_finished => true,
            Self::Qemu { relay, .. } => relay.as_deref().is_some_and(Relay::is_sent),
            _ => false,
        }
    }

    /// The guest was sent: waits until it is loaded. It does not run yet.
    pub(super) fn wait_loaded(&mut self) -> Result<(), Error> {
        match self {
            Self::Qemu { destination, .. } => destination.wait_loaded(),
            _ => Ok(()),
        }
    }

    /// The guest is here: runs it if it may, and puts everything in order.
    pub(super) fn release(&mut self, runs: bool, run: &Run<'_>) -> Result<DestinationState, Error> {
        match self {
            Self::Image(writer) => {
                run.set_increment(writer);
                Ok(DestinationState::Stored)
            }
            #[cfg(feature = "store")]
            Self::Store(writer) => {
                run.set_uploaded(writer.tally());
                Ok(DestinationState::Stored)
            }
            Self::Stream { .. } => Ok(DestinationState::Loaded),
            Self::Memory(memory) => {
                run.set_memory(memory.outcome());
                Ok(DestinationState::Received)
            }
            Self::Null(_) => Ok(DestinationState::Dropped),
            Self::Qemu { destination, .. } => {
                if runs {
                    destination.run()?;
                    run.observer.phase(Phase::Running);
                }
                let notes = destination.release()?;
                notes.iter().for_each(|note| run.observer.notice(note));
                Ok(if runs { DestinationState::Running } else { DestinationState::Paused })
            }
        }
    }

    /// After a failure: gives QEMU's own reason if it has a better one, and says what is left.
    pub(super) fn undo(self, error: Error, run: &Run<'_>) -> (Error, Vec<String>) {
        match self {
            Self::Qemu { mut destination, relay } => {
                drop(relay);
                let error = destination.explain(error);
                (error, destination.undo())
            }
            Self::Stream { address, .. } if blame::peer_is(&error, &address.to_string()) => {
                (blame::lanes_lost(error, run), Vec::new())
            }
            _ => (error, Vec::new()),
        }
    }
}
