//! Where a stream goes: checked, reached when its source is ready, put in order afterwards.

use std::sync::Arc;

use towline_channel::{Address, Channel};
#[cfg(feature = "store")]
use towline_image::store::StoreWriter;
use towline_image::{ImageWriter, Origin};
use towline_migration::incoming::Connections;
use towline_migration::synthetic::Checked;
use towline_migration::{Relay, Session, Sink};
use towline_protocol::session::Receiver;

use super::context::Run;
use super::destination::{QmpDestination, RunFailed};
use super::endpoint::Destination;
use super::error::Error;
use super::fit::{Guest, uuid_bytes};
use super::report::DestinationState;
use super::survey::Survey;
use super::vsock::Vsocks;
use super::zero_copy::lane_options;
use super::{blame, room};
use crate::switchover::{DestinationKind, DestinationView, Started};

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
        /// The main channel of a guest that was sent without a relay.
        sent: Option<Arc<dyn Channel>>,
    },
    Memory(Box<Checked>),
    Null(Survey),
}

/// What is known of a guest that is not at its destination in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undo {
    /// It was to run there.
    pub(super) is_cut_over: bool,
    /// The destination may be the only one that holds it.
    pub(super) holds: bool,
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
                    destination.check(guest, run)?;
                }
                Self::Qemu { destination, relay: None }
            }
            Destination::Stream(address) => {
                let uuid = guest.and_then(|guest| guest.uuid.as_deref()).map_or([0; 16], uuid_bytes);
                Self::Stream { address: address.clone(), uuid, relay: None, sent: None }
            }
            Destination::Memory(room) => Self::Memory(Box::new(room::room(room)?)),
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
            Self::Stream { address, uuid, relay: to, .. } => {
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

    pub(super) fn surveyed(&self) -> bool {
        matches!(self, Self::Null(survey) if survey.is_complete())
    }

    /// What the switchover has to do with.
    pub(super) fn kind(&self) -> DestinationKind {
        match self {
            Self::Qemu { .. } => DestinationKind::Qemu,
            Self::Stream { .. } => DestinationKind::Stream,
            Self::Image(_) | Self::Memory(_) | Self::Null(_) => DestinationKind::Stored,
            #[cfg(feature = "store")]
            Self::Store(_) => DestinationKind::Stored,
        }
    }

    /// What a towline at the source is told becomes of its guest here.
    pub(super) fn receiver(&self) -> Receiver {
        match self.kind() {
            DestinationKind::Qemu => Receiver::Waits,
            DestinationKind::Stored => Receiver::Stores,
            DestinationKind::Stream | DestinationKind::Relayed | DestinationKind::Towline => {
                Receiver::RunsByItself
            }
        }
    }

    /// The main channel of a stream that was sent, behind which another towline may be.
    pub(super) fn channel(&self) -> Option<Arc<dyn Channel>> {
        match self {
            Self::Stream { relay: Some(relay), .. } => Some(relay.main_channel()),
            Self::Stream { sent: Some(channel), .. } => Some(Arc::clone(channel)),
            _ => None,
        }
    }

    /// What a destination that is driven does with the guest.
    pub(super) fn view(&mut self) -> DestinationView {
        match self {
            Self::Qemu { destination, .. } => destination.view(),
            _ => DestinationView::Loaded,
        }
    }

    /// Runs the guest at a destination that is driven, and sees whether it does.
    pub(super) fn run_guest(&mut self) -> Result<Started, RunFailed> {
        match self {
            Self::Qemu { destination, .. } => destination.run_guest(),
            _ => Ok(Started::Live),
        }
    }

    /// Whether the error is one of the connection to it.
    pub(super) fn is_to_blame(&self, error: &Error) -> bool {
        matches!(self, Self::Qemu { destination, .. } if destination.is_to_blame(error))
    }

    /// The guest is here, and runs if it is to: puts everything in order. Returns what to note.
    pub(super) fn settle(&mut self, run: &Run<'_>) -> Result<Vec<String>, Error> {
        match self {
            Self::Qemu { destination, .. } => {
                destination.wait_loaded()?;
                return destination.release();
            }
            Self::Image(writer) => run.set_increment(writer),
            #[cfg(feature = "store")]
            Self::Store(writer) => run.set_uploaded(writer.tally()),
            Self::Memory(memory) => run.set_memory(memory.outcome()),
            Self::Stream { .. } | Self::Null(_) => {}
        }
        Ok(Vec::new())
    }

    /// How a guest is kept here that is stored.
    pub(super) fn stored_state(&self) -> DestinationState {
        match self {
            Self::Memory(_) => DestinationState::Received,
            Self::Null(_) => DestinationState::Dropped,
            // A towline at the other end has stored it.
            Self::Stream { .. } => DestinationState::Loaded,
            _ => DestinationState::Stored,
        }
    }

    /// Lets go of a stream that failed.
    pub(super) fn disconnect(&mut self) {
        if let Self::Qemu { relay, .. } | Self::Stream { relay, .. } = self {
            *relay = None;
        }
    }

    /// After a failure: gives QEMU's own reason if it has a better one, and says what is left.
    pub(super) fn undo(&mut self, error: Error, run: &Run<'_>, undo: Undo) -> (Error, Vec<String>) {
        match self {
            Self::Qemu { destination, .. } => {
                let error = if undo.is_cut_over { error } else { destination.explain(error) };
                (error, destination.undo(undo.holds))
            }
            Self::Stream { address, .. } if blame::peer_is(&error, &address.to_string()) => {
                (blame::lanes_lost(error, run.lanes, run.options.compression), Vec::new())
            }
            _ => (error, Vec::new()),
        }
    }
}
