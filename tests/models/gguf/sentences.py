"""Two hundred strings in ten languages: what people write, with the digits, signs, spaces and line ends they put in."""

from __future__ import annotations

PLAIN = {
    "English": (
        "The tide turns the mill's wheel twice a day.",
        "They'll grind 1,250 sacks of flour; it's enough for winter.",
        "Don't worry: we've DONE this before, haven't we?",
        "def mill(tide: float) -> list[int]: return [int(tide * 2)]",
    ),
    "German": (
        "Die Gezeitenmühle mahlt größere Mengen Korn als früher.",
        "Über 2.500 Bürger müssen für die Straße zahlen – 17,50 € jährlich.",
        "»Ach so«, sagte er, »das ist ja ärgerlich!«",
        "Donaudampfschifffahrtsgesellschaft und Eierschalensollbruchstelle",
    ),
    "French": (
        "L'eau monte jusqu'à la porte, puis elle s'en va.",
        "Où est-ce qu'on achète du pain à 3 h 45 ?",
        "Ça coûte 1 200 € : c'est très cher, n'est-ce pas ?",
        "Le cœur de l'œuvre naïve d'un garçon de Noël",
    ),
    "Spanish": (
        "¿Cuántas veces gira la rueda del molino cada día?",
        "¡Mañana por la mañana habrá niebla en la ría!",
        "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia.",
        "Cuesta 99,95 € y llega el 12/03/2025.",
    ),
    "Russian": (
        "Приливная мельница работает дважды в сутки.",
        "Съешь же ещё этих мягких французских булок, да выпей чаю.",
        "В 1961 году человек впервые полетел в космос!",
        "Объём — 25 м³; цена: 4 500 ₽.",
    ),
    "Chinese": (
        "潮汐磨坊每天转动两次。",
        "我想学习机器学习,你能帮我吗?",
        "今天是2025年3月12日,气温-5℃。",
        "「道可道,非常道。名可名,非常名。」",
    ),
    "Japanese": (
        "潮の満ち引きで水車が一日に二回まわります。",
        "コンピューターで強化学習をします。ガギグゲゴ",
        "価格は1,980円(税込)です!!",
        "すもももももももものうち",
    ),
    "Korean": (
        "물레방아는 하루에 두 번 돕니다.",
        "안녕하세요? 저는 언어 모델을 훈련합니다.",
        "가격은 15,000원이에요~ ㅋㅋㅋ",
        "다람쥐 헌 쳇바퀴에 타고파.",
    ),
    "Arabic": (
        "تدور طاحونة المد مرتين كل يوم.",
        "هل يمكنك أن تشرح لي كيف يتعلم النموذج؟",
        "السعر ٢٥٠ ريالاً فقط، أي 66.5 دولار.",
        "اَلْحَمْدُ لِلّٰهِ رَبِّ الْعَالَمِينَ",
    ),
    "Hindi": (
        "ज्वार की चक्की दिन में दो बार चलती है।",
        "क्या आप मुझे हिन्दी में समझा सकते हैं?",
        "इसका मूल्य ₹१,२५० या 1250 रुपये है।",
        "श्रीमान् क्षत्रिय ज्ञानी और विद्वान हैं।",
    ),
}

SENTENCES = [
    variant
    for texts in PLAIN.values()
    for text in texts
    for variant in (
        text,
        f"  {text}\n\n\t{text[:9]}  ",
        f"{text} 🌊🚣🏽‍♀️ e\u0301 \u00a0…",
        f"{text.upper()} 3.14159 {text[::-1]}",
        f"1. {text}\r\n2) ({text[3:12]})   {{x}}",
    )
]
