//! The state of one run, and its clock: a ready party performs a step, in an order that follows from the
//! seed; without ready parties, time advances to the next arrival.

use fastrand::Rng;

use super::control::Control;
use super::destination::Endpoint;
use super::guest::Guest;
use super::net::{Net, Port};
use super::relay::Relay;
use super::scenario::{Fault, Moment, Scenario, ScenarioEvent, Who};
use super::source::Source;

/// More rounds than any run takes that comes to its end.
const ROUNDS_MAX: u64 = 300_000;

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) net: Net,
    pub(crate) source: Source,
    pub(crate) relay: Option<Relay>,
    pub(crate) destination: Endpoint,
    pub(crate) control: Option<Control>,
    faults: Vec<(Fault, Option<u64>)>,
    /// A fault came to pass.
    pub(crate) disturbed: bool,
    pub(crate) rounds: u64,
}

impl World {
    pub(crate) fn new(scenario: &Scenario, mut rng: Rng) -> Self {
        let guest = Guest::new(scenario.layout.clone(), scenario.write_ns, scenario.hot, &mut rng);
        let mut net = Net::new(rng);
        let mut hops = scenario.links.chunks(scenario.lanes + 1).map(|links| {
            let ports = links.iter().map(|(forward, backward, is_lossy)| {
                net.connect(forward.clone(), backward.clone(), *is_lossy)
            });
            ports.unzip::<Port, Port, Vec<_>, Vec<_>>()
        });
        let (near, far) = hops.next().expect("one hop at least");
        let second = hops.next();
        drop(hops);
        let mut source = Source::new(scenario, guest, near[0], &near[1..]);
        source.guest.running = !scenario.is_image;
        let (relay, last) = match second {
            Some((near, last)) => {
                let relay = Relay::new(scenario, &far, &near);
                (Some(relay), last)
            }
            None => (None, far),
        };
        let destination = Endpoint::new(scenario, last[0], &last[1..]);
        let control = scenario.is_controlled.then(|| Control::new(scenario));
        let faults = scenario.faults.iter().map(|&fault| (fault, None)).collect();
        Self { net, source, relay, destination, control, faults, disturbed: false, rounds: 0 }
    }

    /// Runs to the end; an error if it never comes, or if two guests run.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        loop {
            self.rounds += 1;
            if self.rounds > ROUNDS_MAX {
                let (passes, now) = (self.source.passes, self.net.now);
                return Err(format!("it does not end: {passes} passes, {now} ns, {}", self.states()));
            }
            let worked = self.round();
            self.check_one_guest()?;
            if worked {
                continue;
            }
            if self.is_over() {
                return Ok(());
            }
            // A fault that is still to come counts rounds, whether or not anything happens in them.
            let arrival = self.net.next_arrival();
            if arrival.is_none() && !self.awaits_fault() {
                return Err(format!("it hangs: {}", self.states()));
            }
            self.net.now = arrival.unwrap_or(self.net.now + 1000);
            let now = self.net.now;
            if self.source.is_alive {
                self.source.guest.run_until(now, &mut self.net.rng);
            }
        }
    }

    fn round(&mut self) -> bool {
        self.strike();
        let mut worked = false;
        let first = self.net.rng.usize(0..4);
        for who in 0..4 {
            worked |= match (first + who) % 4 {
                0 => self.source.step(&mut self.net),
                1 => self.relay.as_mut().is_some_and(|relay| relay.step(&mut self.net)),
                2 => self.destination.step(&mut self.net),
                _ => self.control.as_mut().is_some_and(|control| {
                    let relay = self.relay.as_mut().expect("control comes with a relay");
                    control.step(&mut self.net, &mut self.source, relay, &mut self.destination)
                }),
            };
        }
        worked
    }

    /// Returns true if a moment has come.
    fn has_come(&self, moment: Moment) -> bool {
        let relay = self.relay.as_ref();
        match moment {
            Moment::Begin => true,
            Moment::Stopped => self.source.stopped.is_some(),
            Moment::Sent => relay.is_some_and(|relay| relay.is_sent),
            Moment::Loaded => self.destination.is_loaded,
            Moment::Said => self.destination.has_said_so,
            Moment::Forwarding => relay.is_some_and(|relay| relay.is_finished),
            Moment::Completed => self.source.outcome == Some(Ok(())),
        }
    }

    fn awaits_fault(&self) -> bool {
        self.faults.iter().any(|(_, since)| since.is_some())
    }

    fn strike(&mut self) {
        let mut due = Vec::new();
        for index in 0..self.faults.len() {
            let (fault, since) = self.faults[index];
            let since = since.or_else(|| self.has_come(fault.moment).then_some(self.rounds));
            self.faults[index].1 = since;
            if since.is_some_and(|since| self.rounds >= since + fault.after) {
                due.push(index);
            }
        }
        for index in due.into_iter().rev() {
            let (fault, _) = self.faults.remove(index);
            self.disturbed = true;
            self.apply(fault.event);
        }
    }

    fn apply(&mut self, event: ScenarioEvent) {
        match event {
            ScenarioEvent::CancelSource => self.source.cancel(&mut self.net),
            ScenarioEvent::CancelTowline => {
                if let Some(relay) = &mut self.relay {
                    relay.cancel(&mut self.net);
                }
            }
            ScenarioEvent::LoadFails if self.destination.is_alive && !self.destination.is_loaded => {
                self.destination.fail(&mut self.net, "it cannot load the guest".into());
            }
            ScenarioEvent::LoadFails => {}
            ScenarioEvent::Kill(who) => self.kill(who),
        }
    }

    fn kill(&mut self, who: Who) {
        let ports = match who {
            Who::Source => {
                self.source.is_alive = false;
                self.source.guest.running = false;
                self.source.ports()
            }
            Who::Destination => {
                self.destination.is_alive = false;
                self.destination.running = false;
                self.destination.ports()
            }
            Who::Towline => {
                let (Some(relay), Some(control)) = (&mut self.relay, &mut self.control) else { return };
                relay.is_alive = false;
                control.is_alive = false;
                relay.ports()
            }
        };
        ports.into_iter().for_each(|port| self.net.kill(port));
    }

    /// The rule without exceptions, but for a destination that runs the guest on its own.
    fn check_one_guest(&self) -> Result<(), String> {
        if self.source.guest.running && self.destination.running && self.control.is_some() {
            Err("two guests run".into())
        } else {
            Ok(())
        }
    }

    fn is_over(&self) -> bool {
        let source = self.source.outcome.is_some() || !self.source.is_alive;
        let relay = self.relay.as_ref().is_none_or(|relay| relay.outcome.is_some() || !relay.is_alive);
        let destination = self.destination.outcome.is_some() || !self.destination.is_alive;
        let control = self.control.as_ref().is_none_or(|control| control.is_over());
        source && relay && destination && control
    }

    fn states(&self) -> String {
        let relay = self.relay.as_ref().map(|relay| (&relay.outcome, relay.is_alive, relay.is_sent));
        format!(
            "source {:?} {:?}, relay {relay:?}, destination {:?}, control {:?}",
            self.source.phase, self.source.outcome, self.destination.outcome, self.control
        )
    }
}
