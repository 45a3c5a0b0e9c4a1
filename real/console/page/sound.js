// Short tones, so that eyes can stay on the arm.

const TONES = { mine: [660], human: [520, 780], auto: [780, 520], fault: [220, 220, 220] };
let on = true, context = null;

export const turn = (value) => { on = value; };

export function play(name) {
  if (!on || !TONES[name] || !navigator.userActivation?.hasBeenActive) return;
  context ??= new AudioContext();
  TONES[name].forEach((pitch, i) => {
    const [tone, gain] = [context.createOscillator(), context.createGain()];
    const at = context.currentTime + 0.14 * i;
    tone.frequency.value = pitch;
    gain.gain.setValueAtTime(0.08, at);
    gain.gain.exponentialRampToValueAtTime(0.001, at + 0.12);
    tone.connect(gain).connect(context.destination);
    tone.start(at);
    tone.stop(at + 0.13);
  });
}
