//! The start of a guest, from its newest state.

use std::path::Path;
use std::time::Duration;

use towline_control::generations::ManagedGuest;
use towline_control::plan::Observer;
use towline_control::run::{
    self, CommandLineTrust, ImageLocation, PrepareContext, RestoreObserver, RunOptions,
};
use towline_launch::{GuestGenerations, Launcher, Lifetime, RuntimeRoot};
use towline_qmp::commands::Cont;
use towline_qmp::{Client, Options};

use super::here::Decided;
use super::parameters::Parameters;
use super::refusal::{Outcome, Refusal, say};
use super::state::{GuestLine, Origin, host_arguments};
use super::{Agent, TIMEOUT_MIN};
use crate::errors;

impl Agent {
    pub(super) fn start(&self) -> Outcome {
        self.shared.create()?;
        if let Some(here) = self.find()? {
            here.await_agent(self.parameters.peer_timeout * 2);
            // Before it starts a guest, the cluster has stopped it everywhere, or its host is off.
            match here.decide(&self.shared, true, self.may_have_disks()) {
                Decided::Here => {
                    here.0.enter()?;
                    return self.monitor();
                }
                // A stop stores it, so the next start has it.
                Decided::Open => {
                    return Err(Refusal::failed(
                        "this host holds the guest of an interrupted move, and its state cannot be proven to be the newest",
                    ));
                }
                Decided::Elsewhere => {}
            }
            if !here.end(self.left(Duration::ZERO)) {
                return Err(Refusal::failed("a QEMU without the guest cannot be ended"));
            }
        }
        let line = GuestLine::of(&self.parameters)?;
        let newest = self.shared.newest()?;
        match self.shared.origin(newest, &self.parameters.image, &line.disks())? {
            Origin::Image(image) => self.start_from(&image, newest)?,
            Origin::Boot(why) => {
                say(&format!("{} boots afresh from its disks: {why}", self.parameters.name));
                self.boot(&line, newest)?;
            }
        }
        self.monitor()
    }

    fn generations(&self, after: u64) -> GuestGenerations {
        GuestGenerations { directory: self.shared.0.clone(), after }
    }

    fn start_from(&self, image: &Path, newest: u64) -> Outcome {
        let Parameters { name, is_trusted, .. } = &self.parameters;
        let options = RunOptions {
            name: Some(name.clone()),
            lifetime: Lifetime::Detached,
            trust: if *is_trusted { CommandLineTrust::Trusted } else { CommandLineTrust::Untrusted },
            host: host_arguments(&self.parameters),
            generations: Some(self.generations(newest)),
            ..RunOptions::of_one(ImageLocation::File(image.to_owned()))
        };
        let cancel = self.cancel(self.left(TIMEOUT_MIN))?;
        let context = PrepareContext { cancel: &cancel, observer: &self.reporter, downloading: &|_| {} };
        let running = run::prepare(&options, context)?.start(&cancel, &|_| {})?;
        let guest = self.enter()?;
        let observers = [&self.reporter as &dyn Observer];
        let observer =
            RestoreObserver { guests: &observers, all: &self.reporter, running: &|_| {}, ended: &|_, _| {} };
        let restored = running.restore(observer, &cancel);
        let failed = match &restored {
            Ok(copied) => copied.iter().find_map(|copied| copied.as_ref().err()),
            Err(failure) => Some(failure),
        };
        let failed = failed.map(|failure| (failure.guest.needs_attention(), errors::failure_text(failure)));
        let Some(running) = running.settle(&restored, &self.reporter) else {
            let (may_have_run, text) = failed.unwrap_or_default();
            if !may_have_run {
                guest.withdraw()?;
            }
            return Err(Refusal::failed(text));
        };
        running.detach();
        say(&format!("{name} runs from {}, generation {}", image.display(), newest + 1));
        self.shared.prune(image);
        Ok(())
    }

    /// Takes the generation for the QEMU that waits for the guest.
    fn enter(&self) -> Result<ManagedGuest, Refusal> {
        let here = self.find()?.ok_or_else(|| Refusal::failed("the QEMU that was started has ended"))?;
        here.0.enter()?;
        Ok(here.0)
    }

    fn boot(&self, line: &GuestLine, newest: u64) -> Outcome {
        let mut launcher = Launcher::new(RuntimeRoot::of_user().claim(&self.parameters.name)?);
        launcher.is_paused = true;
        launcher.generations = Some(self.generations(newest));
        // It ends with this process unless it runs.
        launcher.lifetime = Lifetime::Detached;
        let qemu = launcher.start(&line.allowed, &line.host)?;
        let run = || {
            self.enter()?;
            Client::connect(qemu.qmp_path(), &Options::default())?.execute(&Cont)?;
            Ok(())
        };
        let ran: Outcome = run();
        if ran.is_err() {
            qemu.kill();
            let _ = qemu.wait(TIMEOUT_MIN);
        }
        ran
    }
}
