//! In place of `xdp`, without the feature `af-xdp`: types without values, so a card is built without it.

use std::sync::Arc;
use std::time::Instant;

use towline_vhost_user::{BackendError, Next, Ring};

use crate::device::Shared;
use crate::statistics::BatchCounters;
use crate::tap::TapContext;
use crate::timer::Timer;
use crate::transmit::Transmitter;

#[derive(Debug)]
pub(crate) enum Xdp {}

pub(crate) enum XdpTransmitter {}

impl XdpTransmitter {
    pub(crate) fn new(_: usize, _: Arc<Xdp>, _: Arc<Shared>) -> Result<Self, BackendError> {
        unreachable!("`Xdp` has no values")
    }

    pub(crate) fn run(
        &mut self,
        _: &mut Ring,
        _: TapContext<'_>,
        _: &mut BatchCounters,
        _: &mut Transmitter,
    ) -> Next {
        match *self {}
    }

    pub(crate) fn reap_while_stopped(&mut self, _: Option<&mut Ring>, _: &mut BatchCounters) {
        match *self {}
    }

    pub(crate) fn drain(
        &mut self,
        _: Option<&mut Ring>,
        _: &mut BatchCounters,
        _: Instant,
    ) -> Result<(), BackendError> {
        match *self {}
    }

    pub(crate) fn release(
        &mut self,
        _: Option<&mut Ring>,
        _: &mut BatchCounters,
        _: Instant,
    ) -> Result<(), BackendError> {
        match *self {}
    }

    pub(crate) fn timer(&self) -> Option<&Timer> {
        match *self {}
    }
}
